"use strict";
(() => {
  const PAGE = 24;
  const MOST_CHOICES = 50;
  const data = JSON.parse(document.getElementById("data").textContent);
  const items = data.items.map(([id, site, given, suggested, wrong, rank, reason, picture]) => ({
    id, site, given, suggested, wrong, rank, reason, picture,
  }));
  const places = new Map(items.map((item, index) => [identity(item), index]));
  const by = (id) => document.getElementById(id);

  /* ---------------------------------------------------------------- what the person decided */

  const verdicts = new Map(); // index of an item → {verdict, label}
  const history = []; // steps to undo, each a list of [index, verdict before or undefined]
  let strangers = []; // saved verdicts on labels that this list does not hold; kept as they are
  let isExported = true;
  let canSave = true;

  /** A label's name in saved and imported verdicts: they hold no lone surrogates, see `wellFormed`. */
  function identity({ id, site, given }) {
    return JSON.stringify([id, site, given].map(wellFormed));
  }

  function wellFormed(text) {
    return text.replace(/\p{Surrogate}/gu, "\ufffd");
  }

  /** The verdict that a saved or imported row means, or null. Only `relabel` needs its label. */
  function understood(index, verdict, label) {
    if (["keep", "drop", "skip"].includes(verdict)) return { verdict, label: "" };
    const isChange = verdict === "relabel" && label !== items[index].given;
    return isChange && data.classes.includes(label) ? { verdict, label } : null;
  }

  function decide(step) {
    const before = step.map(([index]) => [index, verdicts.get(index)]);
    for (const [index, verdict] of step) put(index, verdict);
    history.push(before);
    isExported = false;
    save();
  }

  function put(index, verdict) {
    if (verdict) verdicts.set(index, verdict);
    else verdicts.delete(index);
  }

  function save() {
    const rows = [...verdicts].map(([index, { verdict, label }]) => {
      const { id, site, given } = items[index];
      return [id, site, given, verdict, label];
    });
    try {
      localStorage.setItem(data.key, JSON.stringify([...rows, ...strangers]));
      if (!canSave) warn(null);
      canSave = true;
    } catch {
      canSave = false;
      warn("This browser does not keep your progress: export verdicts.csv before you close the page.");
    }
  }

  function restore() {
    let saved = null;
    try {
      saved = localStorage.getItem(data.key);
      // Reading may work where writing does not. Not tried on the list itself: another window may
      // have saved it since.
      const trial = `${data.key} trial`;
      localStorage.setItem(trial, "");
      localStorage.removeItem(trial);
    } catch {
      canSave = false;
      warn("This browser does not keep your progress: export verdicts.csv before you close the page.");
      return;
    }
    take(saved);
  }

  function take(saved) {
    let rows = [];
    try {
      rows = JSON.parse(saved ?? "[]");
      if (!Array.isArray(rows)) rows = [];
    } catch {
      rows = [];
    }
    verdicts.clear();
    strangers = [];
    for (const row of rows) {
      if (!Array.isArray(row) || row.length !== 5 || !row.every((c) => typeof c === "string")) continue;
      const [id, site, given, verdict, label] = row;
      const index = places.get(identity({ id, site, given }));
      const decided = index === undefined ? null : understood(index, verdict, label);
      if (decided) verdicts.set(index, decided);
      else strangers.push(row);
    }
  }

  /* ---------------------------------------------------------------- verdicts.csv */

  const COLUMNS = ["id", "site", "given", "verdict", "new_label"];

  function escapeCell(text) {
    const isFormula = data.escaped_starts.some((start) => text.startsWith(start));
    return isFormula ? `'${text}` : text;
  }

  function unescapeCell(text) {
    const isEscaped = text.startsWith("'") && data.escaped_starts.some((s) => text.startsWith(s, 1));
    return isEscaped ? text.slice(1) : text;
  }

  function quoted(text) {
    return `"${text.replaceAll('"', '""')}"`;
  }

  function csv() {
    const rows = [COLUMNS];
    items.forEach(({ id, site, given }, index) => {
      const decided = verdicts.get(index);
      if (decided) rows.push([id, site, given, decided.verdict, decided.label]);
    });
    return rows.map((row) => row.map((c) => quoted(escapeCell(wellFormed(c)))).join(",") + "\r\n").join("");
  }

  /** The rows of a table; a cell may stand in double quotes, with "" for one of them. */
  function parseCsv(text) {
    const delimiter = delimiterOf(text);
    const rows = [];
    let row = [], cell = "", isQuoted = false, at = 0;
    const endRow = () => {
      row.push(unescapeCell(cell));
      if (row.length > 1 || row[0] !== "") rows.push(row);
      row = [];
      cell = "";
    };
    while (at < text.length) {
      const sign = text[at++];
      if (isQuoted && sign === '"' && text[at] === '"') { cell += '"'; at++; }
      else if (sign === '"' && (isQuoted || cell === "")) isQuoted = !isQuoted;
      else if (isQuoted) cell += sign;
      else if (sign === delimiter) { row.push(unescapeCell(cell)); cell = ""; }
      else if (sign === "\n" || sign === "\r") {
        if (sign === "\r" && text[at] === "\n") at++;
        endRow();
      } else cell += sign;
    }
    if (cell !== "" || row.length) endRow();
    return rows;
  }

  /** The sign that the header has most of; a spreadsheet may have saved with another than ours. */
  function delimiterOf(text) {
    const header = text.trimStart().split(/[\r\n]/, 1)[0].replace(/"[^"]*"/g, "");
    const counts = [...",;\t|"].map((sign) => [header.split(sign).length, sign]);
    return counts.reduce((best, next) => (next[0] > best[0] ? next : best))[1];
  }

  function download() {
    const link = document.createElement("a");
    link.href = URL.createObjectURL(new Blob([csv()], { type: "text/csv;charset=utf-8" }));
    link.download = "verdicts.csv";
    link.click();
    setTimeout(() => URL.revokeObjectURL(link.href), 10_000);
    isExported = true;
    say(`${plural(verdicts.size, "verdict")} written to verdicts.csv.`);
  }

  async function importFile(file) {
    const [header = [], ...rows] = parseCsv((await file.text()).replace(/^\ufeff/, ""));
    const columns = COLUMNS.map((name) => header.indexOf(name));
    if (columns.includes(-1)) {
      say(`${file.name} is no verdicts.csv: it needs the columns ${COLUMNS.join(", ")}.`);
      return;
    }
    const step = new Map();
    let unknown = 0;
    for (const row of rows) {
      const [id, site, given, verdict, label] = columns.map((column) => row[column] ?? "");
      const index = places.get(identity({ id, site, given }));
      const decided = index === undefined ? null : understood(index, verdict.trim(), label);
      if (decided) step.set(index, decided);
      else unknown += 1;
    }
    if (step.size) decide([...step]);
    const left = unknown ? ` ${plural(unknown, "row")} did not fit this list and ${unknown === 1 ? "was" : "were"} left out.` : "";
    say(`${plural(step.size, "verdict")} imported from ${file.name}.${left}`);
    filter(step.size ? firstOpen() : shown[current]);
  }

  /* ---------------------------------------------------------------- what is shown */

  let shown = []; // indices of the items that fit the filters; verdicts do not change it
  let current = 0; // place in `shown`

  function stateOf(index) {
    const decided = verdicts.get(index);
    if (!decided) return "open";
    return decided.verdict === "skip" ? "skip" : "done";
  }

  /** Where to go on: the first label without a verdict; -1 if there is none. */
  function firstOpen() {
    return items.findIndex((_, index) => !verdicts.has(index));
  }

  function filter(wanted = shown[current]) {
    const given = by("filter-given").value, suggested = by("filter-suggested").value;
    const site = by("filter-site").value, state = by("filter-state").value;
    const least = Number(by("filter-least").value) / 100;
    const part = by("filter-id").value.trim().toLowerCase();
    by("least-shown").textContent = `${by("filter-least").value} %`;
    shown = [];
    items.forEach((item, index) => {
      if (
        (given === "" || item.given === data.classes[given]) &&
        (suggested === "" || item.suggested === data.classes[suggested]) &&
        (site === "" || item.site === sites[site]) &&
        (state === "all" || state === stateOf(index)) &&
        item.wrong >= least &&
        (part === "" || item.id.toLowerCase().includes(part))
      ) shown.push(index);
    });
    current = Math.max(0, shown.indexOf(wanted));
    draw();
  }

  function draw() {
    const first = Math.floor(current / PAGE) * PAGE;
    const visible = shown.slice(first, first + PAGE);
    by("list").replaceChildren(...visible.map((index, offset) => card(index, first + offset)));
    by("list").hidden = by("panel").hidden = visible.length === 0;
    by("empty").hidden = visible.length > 0;
    const pages = Math.max(1, Math.ceil(shown.length / PAGE));
    const page = Math.floor(current / PAGE) + 1;
    by("place").textContent = visible.length
      ? `Page ${page} of ${pages}: ${first + 1}–${first + visible.length} of ${plural(shown.length, "label")}`
      : "";
    by("previous").disabled = page <= 1;
    by("next").disabled = page >= pages;
    drawPanel();
    drawCounts();
  }

  function card(index, place) {
    const item = items[index];
    const node = make("li", "card", { role: "option", id: `label-${place}` });
    const state = verdicts.get(index);
    node.dataset.place = place;
    node.dataset.verdict = state?.verdict ?? "open";
    node.tabIndex = place === current ? 0 : -1;
    node.setAttribute("aria-selected", String(place === current));
    node.setAttribute("aria-label", spoken(index));
    const labels = make("div", "pair");
    const change = make("div", "change");
    change.append(text("span", "arrow", "→"), text("span", "suggested", item.suggested, true));
    labels.append(text("div", "given", item.given, true), change);
    const score = make("div", "card-score");
    score.append(bar(item.wrong), text("span", "percent", percent(item.wrong)));
    node.append(picture(item), labels, score);
    if (state) node.append(text("div", `badge ${state.verdict}`, badge(state)));
    return node;
  }

  function picture(item) {
    const frame = make("div", "thumb");
    if (item.picture === "") {
      frame.append(text("span", "no-picture", "no picture"));
      return frame;
    }
    const image = make("img", "", { alt: "", decoding: "async", draggable: "false" });
    image.addEventListener("load", () => image.classList.toggle("pixels", image.naturalWidth < 100));
    image.addEventListener("error", () => frame.replaceChildren(text("span", "no-picture", "picture cannot be shown")));
    image.src = `data:image/png;base64,${item.picture}`;
    frame.append(image);
    return frame;
  }

  function drawPanel() {
    const index = shown[current];
    if (index === undefined) return;
    const item = items[index], state = verdicts.get(index);
    by("panel-picture").replaceChildren(picture(item));
    show("panel-given", item.given);
    show("panel-suggested", item.suggested === item.given ? "what it is called" : item.suggested);
    by("panel-bar").style.inlineSize = `${100 * item.wrong}%`;
    show("panel-score", `${percent(item.wrong)} likely wrong`);
    show("panel-reason", item.reason);
    show("panel-verdict", state ? `Your verdict: ${badge(state)}` : "");
    by("panel-verdict").className = `verdict ${state?.verdict ?? ""}`;
    show("keep-label", item.given);
    show("relabel-label", item.suggested);
    document.querySelector("[data-act=relabel]").disabled = item.suggested === item.given;
    show("panel-rank", `${item.rank} of ${items.length}`);
    show("panel-site", item.site);
    show("panel-id", item.id);
  }

  function drawCounts() {
    const tally = { keep: 0, relabel: 0, drop: 0, skip: 0 };
    for (const { verdict } of verdicts.values()) tally[verdict] += 1;
    const done = tally.keep + tally.relabel + tally.drop;
    const parts = [`${done} checked`];
    if (done) parts[0] += ` (${tally.keep} kept, ${tally.relabel} relabelled, ${tally.drop} dropped)`;
    if (tally.skip) parts.push(`${tally.skip} skipped`);
    parts.push(`${items.length - verdicts.size} left`);
    by("counts").textContent = parts.join(" · ");
    by("progress").setAttribute("aria-valuenow", String(done));
    by("progress").setAttribute("aria-valuetext", parts.join(", "));
    by("progress-fill").style.inlineSize = `${items.length ? (100 * done) / items.length : 0}%`;
    by("undo").disabled = history.length === 0;
    by("export").disabled = verdicts.size === 0;
  }

  function badge({ verdict, label }) {
    return { keep: "✓ kept", relabel: `⇄ ${label}`, drop: "✕ dropped", skip: "– skipped" }[verdict];
  }

  function spoken(index) {
    const { given, suggested, wrong } = items[index];
    const state = verdicts.get(index);
    const words = state ? { keep: "kept", relabel: `relabelled to ${state.label}`, drop: "dropped", skip: "skipped" }[state.verdict] : "not checked";
    return `given ${given}, suggested ${suggested}, ${percent(wrong)} likely wrong, ${words}`;
  }

  /* ---------------------------------------------------------------- small helpers */

  function make(tag, className, attributes = {}) {
    const node = document.createElement(tag);
    if (className) node.className = className;
    for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
    return node;
  }

  function text(tag, className, content, isData = false) {
    const node = make(tag, className, isData ? { dir: "auto", title: content } : {});
    node.textContent = content;
    return node;
  }

  function show(id, content) {
    by(id).textContent = content;
  }

  function bar(share) {
    const outer = make("div", "bar"), inner = make("div", "");
    inner.style.inlineSize = `${100 * share}%`;
    outer.append(inner);
    return outer;
  }

  /** Never 100 % for what is not certain. */
  function percent(share) {
    const rounded = Math.round(100 * share);
    return rounded === 100 && share < 1 ? "> 99 %" : `${rounded} %`;
  }

  function plural(count, noun) {
    return `${count} ${noun}${count === 1 ? "" : "s"}`;
  }

  let silence = 0;
  function say(sentence) {
    show("status", sentence);
    clearTimeout(silence);
    silence = setTimeout(() => show("status", ""), 6_000);
  }

  function warn(sentence) {
    by("warning").hidden = sentence === null;
    show("warning", sentence ?? "");
  }

  /* ---------------------------------------------------------------- acting */

  function judge(verdict, label = "") {
    const index = shown[current];
    if (index === undefined) return;
    const item = items[index];
    if (verdict === "relabel" && label === item.given) [verdict, label] = ["keep", ""];
    decide([[index, { verdict, label }]]);
    const did = { keep: "Kept", relabel: "Relabelled", drop: "Dropped", skip: "Skipped" }[verdict];
    const rest = items.length - verdicts.size;
    const end = rest === 0 ? " Every label has a verdict; export verdicts.csv." : "";
    say(verdict === "relabel" ? `${did} ${item.given} to ${label}.${end}` : `${did} ${item.given}.${end}`);
    go(current + 1);
  }

  function relabel() {
    const item = items[shown[current]];
    if (item === undefined) return;
    if (item.suggested === item.given) say("The suggestion is the given label; press C to choose another class.");
    else judge("relabel", item.suggested);
  }

  function undo() {
    const step = history.pop();
    if (!step) return;
    for (const [index, verdict] of step) put(index, verdict);
    isExported = false;
    save();
    const place = shown.indexOf(step[0][0]);
    say(step.length === 1 ? `Took back the verdict on ${items[step[0][0]].given}.` : `Took back ${step.length} verdicts.`);
    if (place >= 0) go(place);
    else draw();
  }

  /** Choose another place in `shown`; the focus goes along if it was on a card. */
  function go(place) {
    const hadFocus = by("list").contains(document.activeElement);
    current = Math.min(Math.max(place, 0), Math.max(0, shown.length - 1));
    draw();
    const chosen = document.querySelector(".card[aria-selected=true]");
    if (chosen && hadFocus) chosen.focus({ preventScroll: true });
    chosen?.scrollIntoView({ block: "nearest" });
  }

  function turn(pages) {
    const page = Math.floor(current / PAGE) + pages;
    if (page >= 0 && page * PAGE < shown.length) go(page * PAGE);
  }

  function perRow() {
    const cards = [...by("list").children];
    return Math.max(1, cards.filter((c) => c.offsetTop === cards[0].offsetTop).length);
  }

  function openChoose() {
    if (shown[current] === undefined) return;
    by("choose-text").value = "";
    listChoices();
    by("choose").showModal();
    by("choose-text").focus();
  }

  let choices = [], active = 0;
  function listChoices() {
    const typed = by("choose-text").value.trim().toLowerCase();
    const found = data.classes.filter((name) => name.toLowerCase().includes(typed));
    const starts = (name) => Number(!name.toLowerCase().startsWith(typed));
    choices = found.sort((a, b) => starts(a) - starts(b)).slice(0, MOST_CHOICES);
    active = 0;
    drawChoices();
  }

  function drawChoices() {
    const item = items[shown[current]];
    const nodes = choices.map((name, place) => {
      const node = make("li", "", { role: "option", id: `choice-${place}` });
      node.setAttribute("aria-selected", String(place === active));
      node.append(text("span", "", name, true));
      if (name === item.given) node.append(text("span", "muted", "given"));
      if (name === item.suggested) node.append(text("span", "muted", "suggested"));
      node.addEventListener("click", () => pick(place));
      return node;
    });
    by("choose-list").replaceChildren(...nodes);
    nodes[active]?.scrollIntoView({ block: "nearest" });
    by("choose-none").hidden = nodes.length > 0;
    if (nodes.length) by("choose-text").setAttribute("aria-activedescendant", `choice-${active}`);
    else by("choose-text").removeAttribute("aria-activedescendant");
  }

  function pick(place) {
    const name = choices[place];
    if (name === undefined) return;
    by("choose").close();
    judge("relabel", name);
  }

  const ACTS = {
    keep: () => judge("keep"),
    relabel,
    choose: openChoose,
    drop: () => judge("drop"),
    skip: () => judge("skip"),
  };
  const LETTERS = {
    k: ACTS.keep, r: relabel, c: openChoose, d: ACTS.drop, s: ACTS.skip, u: undo,
    n: () => turn(1), p: () => turn(-1),
    e: () => verdicts.size && download(),
    "?": () => by("help").showModal(),
  };
  const MOVES = {
    ArrowRight: () => go(current + 1),
    ArrowLeft: () => go(current - 1),
    ArrowDown: () => go(current + perRow()),
    ArrowUp: () => go(current - perRow()),
    Home: () => go(Math.floor(current / PAGE) * PAGE),
    End: () => go(Math.floor(current / PAGE) * PAGE + PAGE - 1),
    PageDown: () => turn(1),
    PageUp: () => turn(-1),
  };

  function pressed(event) {
    if (event.ctrlKey || event.metaKey || event.altKey || event.isComposing) return;
    if (document.querySelector("dialog[open]") || event.target.closest("input, select")) return;
    const isFree = event.target === document.body || by("list").contains(event.target);
    const letter = by("shortcuts").checked ? LETTERS[event.key.toLowerCase()] : undefined;
    const act = letter ?? (isFree && shown.length ? MOVES[event.key] : undefined);
    if (!act) return;
    event.preventDefault();
    if (event.target === document.body) document.querySelector(".card[aria-selected=true]")?.focus({ preventScroll: true });
    act();
  }

  function chose(event) {
    const moves = { ArrowDown: 1, ArrowUp: -1 };
    if (event.key in moves && choices.length) {
      event.preventDefault();
      active = (active + moves[event.key] + choices.length) % choices.length;
      drawChoices();
    } else if (event.key === "Enter" && !event.isComposing) {
      event.preventDefault();
      pick(active);
    }
  }

  /* ---------------------------------------------------------------- start */

  const sites = [...new Set(items.map((item) => item.site))].sort();

  function options(id, all, names, of) {
    const counts = new Map();
    for (const item of items) counts.set(of(item), (counts.get(of(item)) ?? 0) + 1);
    const nodes = names.map((name, value) => {
      const node = text("option", "", `${name} (${counts.get(name) ?? 0})`);
      node.value = String(value);
      return counts.has(name) ? node : null;
    });
    const every = text("option", "", all);
    every.value = "";
    by(id).replaceChildren(every, ...nodes.filter(Boolean));
  }

  options("filter-given", "any", data.classes, (item) => item.given);
  options("filter-suggested", "any", data.classes, (item) => item.suggested);
  options("filter-site", "all sites", sites, (item) => item.site);
  by("site-filter").hidden = sites.length < 2;
  by("shortcuts").checked = true;
  by("filter-box").open = !matchMedia("(max-width: 760px)").matches; // see review.css

  document.addEventListener("keydown", pressed);
  by("filters").addEventListener("input", () => filter());
  by("no-filters").addEventListener("click", () => {
    by("filters").reset();
    filter();
  });
  by("filters").addEventListener("submit", (event) => event.preventDefault());
  by("list").addEventListener("focusin", (event) => {
    const place = Number(event.target.closest(".card").dataset.place);
    if (place !== current) go(place);
  });
  for (const node of document.querySelectorAll("[data-act]")) {
    node.addEventListener("click", () => ACTS[node.dataset.act]());
  }
  by("undo").addEventListener("click", undo);
  by("export").addEventListener("click", download);
  by("import").addEventListener("click", () => by("file").click());
  by("file").addEventListener("change", async () => {
    const [file] = by("file").files;
    by("file").value = "";
    if (file) await importFile(file);
  });
  by("previous").addEventListener("click", () => turn(-1));
  by("next").addEventListener("click", () => turn(1));
  by("open-help").addEventListener("click", () => by("help").showModal());
  by("choose-text").addEventListener("input", listChoices);
  by("choose-text").addEventListener("keydown", chose);
  for (const node of document.querySelectorAll("[data-close]")) {
    node.addEventListener("click", () => node.closest("dialog").close());
  }
  addEventListener("storage", (event) => {
    if (event.key !== data.key) return; // another window works on the same list
    take(event.newValue);
    history.length = 0;
    draw();
  });
  addEventListener("beforeunload", (event) => {
    if (!canSave && !isExported) event.preventDefault();
  });

  restore();
  by("filters").reset(); // browsers keep what was chosen before a reload
  filter(firstOpen());
})();
