"""The ClientApp: a site's part of a federation. Each message may come to a new process."""

from __future__ import annotations

import logging
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TypeVar

import numpy as np
from flwr.app import Context, Error, Message, RecordDict
from flwr.clientapp import ClientApp

from fedsieve.errors import check
from fedsieve.files import write_atomically
from fedsieve.flower import site
from fedsieve.flower.messages import FAILED, NOTHING_YET, Order, Question, Receipt
from fedsieve.flower.records import read, to_content
from fedsieve.flower.site import Place, SiteData, SiteFolder
from fedsieve.local.bench import EagerBench
from fedsieve.methods import method
from fedsieve.methods.contract import Method, Suspicion
from fedsieve.recipe import Recipe
from fedsieve.serial import encode, to_device
from fedsieve.simulate.directory import MODEL, Model
from fedsieve.simulate.runners import one_thread
from fedsieve.simulate.world import Job, run_site
from fedsieve.types import Shard

T = TypeVar("T")

BEGAN_ANEW = "began_anew"
"""Metric of a site whose state was lost: 1 in the round in which it began anew."""
ERRORS = "errors.log"
DISTRUSTED = "not trusted by the method"

app = ClientApp()


@app.query("hello")  # type: ignore[untyped-decorator, unused-ignore]
def hello(message: Message, context: Context) -> Message:
    """Say who this site is."""
    return _answer(message, context, _hello)


@app.train("round")  # type: ignore[untyped-decorator, unused-ignore]
def round(message: Message, context: Context) -> Message:
    """Do this site's part in a round."""
    return _answer(message, context, _round)


@app.evaluate("finish")  # type: ignore[untyped-decorator, unused-ignore]
def finish(message: Message, context: Context) -> Message:
    """Write down what this site has gained."""
    return _answer(message, context, _finish)


def _answer(
    message: Message, context: Context, act: Callable[[Place, RecordDict], RecordDict]
) -> Message:
    """The reply to `message`.

    Of a failure the server learns the kind and no more: the text of an error may name a file or a
    sample. The site finds it in its own errors.log.
    """
    try:
        content = act(Place.of(context.node_config), message.content)
    except Exception as error:
        _write_down(context, traceback.format_exc())
        return Message(Error(FAILED, type(error).__name__), reply_to=message)
    return Message(content, reply_to=message)


def _write_down(context: Context, text: str) -> None:
    logging.getLogger("flwr").error(text)
    folder = context.node_config.get("state-path")
    if isinstance(folder, str) and folder:
        try:
            path = Path(folder).expanduser() / ERRORS
            path.parent.mkdir(parents=True, exist_ok=True)
            with path.open("a", encoding="utf-8") as file:
                file.write(f"{datetime.now(UTC).isoformat(timespec='seconds')} {text}\n")
        except Exception:
            logging.getLogger("flwr").exception("%s cannot be written", ERRORS)


def _hello(place: Place, content: RecordDict) -> RecordDict:
    question = read(content, "question", Question)
    return to_content(hello=site.hello(place, question.recipe))


def _round(place: Place, content: RecordDict) -> RecordDict:
    work = Work.of(place, read(content, "order", Order))
    order = work.order
    down = work.on_device(read(content, "down", work.method.down))
    with work.folder.lock():
        state = work.folder.load(order.after)
        job = Job(order.client, work.on_device(state), down)
        with one_thread():
            result = run_site(work.recipe, work.shard, work.bench, order.round, job)
        # Last of all, so that whatever fails before leaves the site as it was.
        work.folder.commit(order.round, result.state, order.after)
    metrics = dict(result.metrics)
    if state is None and order.after != NOTHING_YET and work.folder.keeps_state:
        metrics[BEGAN_ANEW] = 1.0
    receipt = Receipt(work.method.name, order.client, order.round)
    return to_content(metrics, receipt=receipt, up=result.up)


def _finish(place: Place, content: RecordDict) -> RecordDict:
    work = Work.of(place, read(content, "order", Order))
    order, cfg = work.order, work.recipe.method
    down = work.on_device(read(content, "down", work.method.down))
    model = read(content, "model", Model)
    with work.folder.lock():
        state = work.on_device(work.folder.load(order.after))
        if state is None:
            state = work.method.init_client(cfg, work.shard)
        with one_thread():
            suspicion = work.method.suspect(cfg, state, down, work.shard, work.bench)
        write_results(work.folder.path, place.site, work.data, model, suspicion)
    return to_content(receipt=Receipt(work.method.name, order.client, order.round))


@dataclass(frozen=True)
class Work:
    """An order and all that the site needs to carry it out."""

    order: Order
    recipe: Recipe
    method: Method
    data: SiteData
    shard: Shard
    bench: EagerBench
    folder: SiteFolder

    @staticmethod
    def of(place: Place, order: Order) -> Work:
        charter = order.charter
        recipe = site.recipe_of(charter.recipe)
        chosen = method(recipe.method.name)
        check(
            place.client in (None, order.client),
            f"This node plays client {place.client}, but was asked to be {order.client}.",
        )
        data = site.data_of(place, charter.recipe, charter)
        bench = site.bench_of(charter)
        return Work(
            order=order,
            recipe=recipe,
            method=chosen,
            data=data,
            shard=to_device(data.shard(order.client), bench.device),
            bench=bench,
            folder=SiteFolder(place.folder(charter.federation), chosen.client),
        )

    def on_device(self, record: T) -> T:
        return to_device(record, self.bench.device)


def write_results(folder: Path, site: str, data: SiteData, model: Model, found: Suspicion) -> None:
    """The global model, the site's labels in the order in which to look at them again, and the page
    on which to do so."""
    # Not above: no other message needs it, and each one may start a process.
    from fedsieve.audit.score import NO_DOUBT, Scores, listed
    from fedsieve.audit.site import write_for_site
    from fedsieve.audit.suspects import FLAG
    from fedsieve.data.own.pixels import image_of
    from fedsieve.data.own.thumbs import small_png

    write_atomically(folder / MODEL, encode(model))
    p_wrong = found.p_wrong.numpy(force=True).astype(np.float64)
    ranks = np.empty(len(p_wrong), dtype=np.int64)
    ranks[np.argsort(-p_wrong, kind="stable")] = np.arange(1, len(p_wrong) + 1)
    reasons = tuple(DISTRUSTED if p >= FLAG else NO_DOUBT for p in p_wrong)
    scores = Scores(p_wrong, found.suggested.numpy(force=True), ranks, reasons)
    suspects = listed(data.names, data.labels.numpy(), data.classes, scores)
    images = dict(zip(data.names, data.images, strict=True))
    write_for_site(
        folder,
        site,
        data.classes,
        suspects,
        lambda sample: small_png(image_of(images[sample].numpy())),
        key=f"{folder.name}/{site}",
    )
