"""`fedsieve deploy`: a federation on real machines, with encryption and keys from the start."""

from __future__ import annotations

import datetime
import importlib.util
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from fedsieve.cli import INTERRUPTED
from fedsieve.cli.options import POSITIONAL, parse
from fedsieve.cli.output import print_table
from fedsieve.errors import FedsieveError, check


@dataclass(frozen=True, kw_only=True)
class InitOptions:
    """At the server: found a federation. Makes its authority, and an invitation for the sites."""

    folder: Path = field(metadata=POSITIONAL)
    """The server's folder; it is made."""
    address: str
    """HOST or HOST:PORT under which sites will reach the server (port 8000 if left out)."""
    insecure: bool = False
    """No encryption and no keys; refused unless the address is this machine's own."""


@dataclass(frozen=True, kw_only=True)
class JoinOptions:
    """At a site: accept an invitation. Makes the site's key, which never leaves this machine."""

    folder: Path = field(metadata=POSITIONAL)
    """The site's folder; it is made."""
    invitation: Path
    """The file federation.toml that the server made."""
    name: str
    """What the site is called in logs and tables."""


@dataclass(frozen=True, kw_only=True)
class AdmitOptions:
    """At the server: let a site in, also while the server runs."""

    folder: Path = field(metadata=POSITIONAL)
    """The server's folder."""
    key: Path = field(metadata=POSITIONAL)
    """The .pub file that the site sent."""


@dataclass(frozen=True, kw_only=True)
class RemoveOptions:
    """At the server: let a site in no more, also while the server runs."""

    folder: Path = field(metadata=POSITIONAL)
    """The server's folder."""
    name: str = field(metadata=POSITIONAL)
    """The site."""


@dataclass(frozen=True, kw_only=True)
class SitesOptions:
    """At the server: list the sites that are admitted."""

    folder: Path = field(metadata=POSITIONAL)
    """The server's folder."""


@dataclass(frozen=True, kw_only=True)
class ServerOptions:
    """At the server: run a federation. The same command again goes on where it was stopped."""

    recipe: str | None = field(default=None, metadata=POSITIONAL)
    """A TOML file, or a name from `fedsieve recipes`."""
    out: Path | None = None
    """Folder of the run; left out: run/ in the server's folder."""
    sites: int = 0
    """Sites to wait for before the first round; 0: all that are admitted now."""
    deadline: float = 3600.0
    """Seconds that the sites have for their part in a round."""
    wait: float = 3600.0
    """Seconds to wait for sites that are not there before giving up; 0: for ever."""


@dataclass(frozen=True, kw_only=True)
class SiteOptions:
    """At a site: take part, until Ctrl-C. Waits for the server, and comes back after every cut."""

    folder: Path = field(metadata=POSITIONAL)
    """The site's folder."""
    data: Path | None = None
    """The site's images."""
    source: str | None = None
    """What kind of data they are, where that is not clear from the files; `fedsieve data` lists
    the kinds."""
    client: int | None = None
    """Instead of data: play this client of the recipe's scene, to try things out."""


def main(argv: Sequence[str]) -> int:
    actions: dict[str, tuple[Callable[[Sequence[str]], int], type]] = {
        "init": (_init, InitOptions),
        "join": (_join, JoinOptions),
        "admit": (_admit, AdmitOptions),
        "remove": (_remove, RemoveOptions),
        "sites": (_sites, SitesOptions),
        "server": (_server, ServerOptions),
        "site": (_site, SiteOptions),
    }
    if not argv or argv[0] in ("-h", "--help", "help"):
        print("usage: fedsieve deploy ACTION [OPTIONS]\n\nactions:")
        for name, (_, options) in actions.items():
            print(f"  {name:8}{' '.join((options.__doc__ or '').split())}")
        print("\n`fedsieve deploy ACTION --help` explains an action.")
        return 0
    name, *rest = argv
    check(name in actions, f"There is no action {name!r}; choose one of {', '.join(actions)}.")
    check(
        importlib.util.find_spec("flwr") is not None,
        "This needs Flower; install it with `pip install 'fedsieve[flower]'`.",
    )
    return actions[name][0](rest)


def _init(argv: Sequence[str]) -> int:
    from fedsieve.deploy.address import parse_address
    from fedsieve.deploy.folders import ServerFolder

    options = parse(InitOptions, "fedsieve deploy init", argv)
    address = parse_address(options.address)
    now = datetime.datetime.now(datetime.UTC)
    folder = ServerFolder.create(options.folder, address, insecure=options.insecure, now=now)
    print(f"Founded a federation at {address} in {folder.path}.")
    if options.insecure:
        print("It has no keys, so every site on this machine may come in.")
    else:
        print(f"Fingerprint of its authority:\n  {_two_lines(folder.invitation().fingerprint)}")
        print(
            f"\nSend {folder.invitation_file} to every site; it holds no secret. Then:\n"
            "  at the site   fedsieve deploy join FOLDER --invitation federation.toml --name NAME\n"
            "                It shows the fingerprint above: compare them, best by telephone.\n"
            "                It makes NAME.pub, which comes back here.\n"
            f"  here          fedsieve deploy admit {folder.path} NAME.pub\n"
            f"                fedsieve deploy server {folder.path} RECIPE"
        )
    return 0


def _join(argv: Sequence[str]) -> int:
    from fedsieve.deploy.folders import SiteFolder, read_invitation

    options = parse(JoinOptions, "fedsieve deploy join", argv)
    folder = SiteFolder.create(options.folder, read_invitation(options.invitation), options.name)
    config, key = folder.config(), folder.public_key()
    print(f"{config.name} has accepted the invitation of {config.server} in {folder.path}.")
    if not config.insecure:
        print(
            "Fingerprint of the server's authority (must be the one that the server shows):\n"
            f"  {_two_lines(config.fingerprint)}\n\n"
            f"Send {folder.public_key_file(config.name)} to the server; it holds no secret.\n"
            f"Its fingerprint: {key.fingerprint}\n"
            f"{folder.key_file} is secret and stays here."
        )
    print(f"Then: fedsieve deploy site {folder.path} --data FOLDER_WITH_IMAGES")
    return 0


def _admit(argv: Sequence[str]) -> int:
    from fedsieve.deploy.folders import ServerFolder
    from fedsieve.deploy.keys import read_public_key

    options = parse(AdmitOptions, "fedsieve deploy admit", argv)
    key = read_public_key(options.key)
    ServerFolder(options.folder).admit(key)
    print(f"{key.name} may come in. Its key's fingerprint: {key.fingerprint}")
    return 0


def _remove(argv: Sequence[str]) -> int:
    from fedsieve.deploy.folders import ServerFolder

    options = parse(RemoveOptions, "fedsieve deploy remove", argv)
    ServerFolder(options.folder).remove(options.name)
    print(f"{options.name} may come in no more.")
    return 0


def _sites(argv: Sequence[str]) -> int:
    from fedsieve.deploy.folders import ServerFolder

    options = parse(SitesOptions, "fedsieve deploy sites", argv)
    folder = ServerFolder(options.folder)
    folder.invitation()
    print_table(["site", "key"], [[key.name, key.fingerprint] for key in folder.admitted()])
    return 0


def _server(argv: Sequence[str]) -> int:
    import tomli_w

    from fedsieve.cli.grid import read_command
    from fedsieve.deploy.folders import ServerFolder
    from fedsieve.deploy.server import Job, serve
    from fedsieve.flower import app_folder
    from fedsieve.recipe import recipe_table
    from fedsieve.simulate.directory import RunDirectory

    place = argv[0] if argv and not argv[0].startswith("-") else None
    rest = argv[1:] if place is not None else argv
    command = f"fedsieve deploy server {place or 'FOLDER'}"
    options, grid = read_command(ServerOptions, command, rest)
    if place is None:
        raise FedsieveError("Give the server's folder first: fedsieve deploy server FOLDER RECIPE")
    check(
        options.recipe is not None,
        f"Give a recipe: {command} RECIPE (`fedsieve recipes` lists those that ship).",
    )
    check(
        len(grid.runs) == 1,
        f"This recipe is a grid of {len(grid.runs)} runs; a federation does one at a time, so "
        "set what it sweeps with options.",
    )
    folder = ServerFolder(Path(place))
    admitted = len(folder.admitted())
    insecure = folder.invitation().insecure
    check(
        insecure or admitted > 0 or options.sites > 0,
        f"No site is admitted yet; give `fedsieve deploy admit {place} NAME.pub`, or say with "
        "--sites how many will come.",
    )
    out = (options.out or folder.results).resolve()
    recipe = grid.runs[0].recipe
    RunDirectory(out).refuse_other(recipe)  # now, not when all sites are there
    settings = {
        "recipe-toml": tomli_w.dumps(recipe_table(recipe)),
        "out": str(out),
        "sites": options.sites or admitted,
        "deadline": options.deadline,
        "wait": options.wait,
    }
    try:
        serve(folder, Job(app_folder(), settings), _say, _echo)
    except KeyboardInterrupt:
        _say(f"Stopped; what is saved in {out} stays, and the same command goes on from there.")
        return INTERRUPTED
    print(f"Results in {out}")
    return 0


def _site(argv: Sequence[str]) -> int:
    from fedsieve.deploy.folders import SiteFolder
    from fedsieve.deploy.site import SiteData, take_part

    options = parse(SiteOptions, "fedsieve deploy site", argv)
    data = SiteData(path=options.data, source=options.source, client=options.client)
    try:
        take_part(SiteFolder(options.folder), data, _say, _echo)
    except KeyboardInterrupt:
        _say("Stopped; the same command takes part again.")
    return 0


def _say(sentence: str) -> None:
    now = datetime.datetime.now().strftime("%H:%M:%S")
    print(f"{now} fedsieve: {sentence}", file=sys.stderr, flush=True)


def _echo(line: str) -> None:
    print(line, flush=True)


def _two_lines(fingerprint: str) -> str:
    groups = fingerprint.split()
    return " ".join(groups[:8]) + "\n  " + " ".join(groups[8:])
