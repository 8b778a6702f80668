"""`fedsieve deploy server`: SuperLink and gate, the sites' keys, one run, and a clean end."""

from __future__ import annotations

import contextlib
import datetime
import json
import re
import socket
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import tomli_w

from fedsieve.deploy.address import Address
from fedsieve.deploy.certificates import make_server_certificate
from fedsieve.deploy.children import Child, alone_in, call, stopping_on_signals
from fedsieve.deploy.folders import Invitation, ServerFolder
from fedsieve.deploy.gate import GuestList, open_gate
from fedsieve.deploy.keys import PublicKey, private_folder, write_private
from fedsieve.deploy.supervise import RealClock, Voice
from fedsieve.errors import FedsieveError, check
from fedsieve.files import write_atomically
from fedsieve.ports import free_port
from fedsieve.simulate.directory import command_line

CONNECTION = "deploy"
"""Name of the SuperLink in Flower's own configuration."""
START_SECONDS = 60.0
SILENT_SECONDS = 60.0
"""A site that has not been heard of for so long is away."""
POLL_SECONDS = 0.5
REGISTRY_SECONDS = 3.0
"""How often the server looks for newly admitted and removed sites."""

Say = Callable[[str], None]


@dataclass(frozen=True)
class Job:
    """What the federation shall do: a Flower app and its settings."""

    app: Path
    settings: Mapping[str, Any]


def serve(folder: ServerFolder, job: Job, say: Say, echo: Say) -> None:
    """Run a federation from `folder` until the job is done; the same call goes on after a cut.

    `say` gets our sentences and `echo` the lines of the server's log.
    """
    invitation = folder.invitation()
    with stopping_on_signals(), alone_in(folder, say):
        registry = Registry(folder)
        with _open(folder, invitation, say) as (superlink, guests):
            registry.update(guests)
            say(f"The server is ready for sites at {invitation.server}.")
            run_id = _submit(folder, job)
            _watch(folder, run_id, superlink, registry, guests, say, echo)


@contextlib.contextmanager
def _open(
    folder: ServerFolder, invitation: Invitation, say: Say
) -> Iterator[tuple[Child, GuestList]]:
    """A SuperLink for this machine, and the gate that leads to it from outside."""
    flower = private_folder(folder.flower).resolve()
    inner = Address("127.0.0.1", free_port())
    public = invitation.server
    guests = GuestList(everybody=invitation.insecure)
    connection: dict[str, Any] = {"address": str(inner)}
    command = ["flower-superlink", "--host", inner.host, "--port", str(inner.port)]
    command += ["--disable-runtime-dependency-installation"]
    command += ["--database", str(flower / "superlink.db")]
    certificate = key = None
    if invitation.insecure:
        say("Without encryption and keys: for trying things on one machine only.")
        command += ["--insecure"]
        connection["insecure"] = True
    else:
        ca, certificate, key = flower / "ca.crt", flower / "server.crt", flower / "server.key"
        names = [public, Address("127.0.0.1"), Address("localhost")]
        pem, private = make_server_certificate(
            folder.authority(), names, datetime.datetime.now(datetime.UTC)
        )
        write_atomically(ca, invitation.authority.encode())
        write_atomically(certificate, pem)
        write_private(key, private)
        command += ["--ssl-ca-certfile", str(ca), "--ssl-certfile", str(certificate)]
        command += ["--ssl-keyfile", str(key), "--enable-supernode-auth"]
        connection["root-certificates"] = str(ca)
    configuration = {"superlink": {"default": CONNECTION, CONNECTION: connection}}
    write_atomically(flower / "config.toml", tomli_w.dumps(configuration).encode())
    with open_gate(
        Address(public.listen_host, public.port),
        inner,
        guests,
        certificate=certificate,
        key=key,
        authority=invitation.authority,
    ):
        superlink = Child(folder, "superlink", command)
        try:
            _wait_for(superlink, inner)
            yield superlink, guests
        finally:
            superlink.stop()


def _wait_for(superlink: Child, address: Address) -> None:
    until = time.monotonic() + START_SECONDS
    while time.monotonic() < until:
        _check_alive(superlink)
        with contextlib.suppress(OSError), socket.create_connection((address.host, address.port)):
            return
        time.sleep(0.1)
    raise FedsieveError(
        f"The SuperLink is not up after {START_SECONDS:.0f} s; {superlink.log} says why."
    )


def _check_alive(superlink: Child) -> None:
    check(
        superlink.poll() is None,
        f"The SuperLink has ended, {superlink.log} says why; give the same command again, and the "
        "run goes on from its last saved round.",
    )


class Registry:
    """Makes SuperLink and gate know the admitted keys.

    Flower never takes a key back that it was told to forget, so the SuperLink keeps the keys of
    removed sites, and the gate alone shuts these out. Made before the SuperLink starts, which makes
    itself a new database where there is none.
    """

    def __init__(self, folder: ServerFolder) -> None:
        self._folder = folder
        self._file = folder.flower / "registered.json"
        self._known: set[str] = set()
        if self._file.exists() and (folder.flower / "superlink.db").exists():
            self._known = set(json.loads(self._file.read_bytes()))

    def update(self, guests: GuestList) -> list[str]:
        """Let in exactly the admitted sites; the result names those that the SuperLink did not
        know. A damaged key shuts out its own site, and is complained of when all others are as they
        should be."""
        admitted, damage = self._folder.readable_keys()
        new = [key for key in admitted if key.fingerprint not in self._known]
        if guests.is_complete:  # who is removed need not wait for who is new
            guests.admit(tuple(key for key in admitted if key not in new))
        for key in new:
            self._register(key)
        guests.admit(admitted)
        if damage is not None:
            raise damage
        return [key.name for key in new]

    def _register(self, key: PublicKey) -> None:
        path = self._folder.key_file(key.name)
        hint = f"{self._folder.logs / 'superlink.log'} says more"
        try:
            flwr(self._folder, ["supernode", "register", str(path), CONNECTION], hint)
        except FedsieveError as error:
            if "already in use" not in str(error):  # by a server that was cut right after it
                raise
        self._known.add(key.fingerprint)
        write_atomically(self._file, json.dumps(sorted(self._known)).encode())


def flwr(folder: ServerFolder, words: list[str], hint: str) -> Mapping[str, Any]:
    """The reply of a command of Flower's, as a record; one sentence where it fails."""
    done = call(folder, ["flwr", *words, "--format", "json"])
    try:
        reply = json.loads(done.stdout[done.stdout.index("{") :])
    except ValueError:
        reply = {}
    if done.returncode != 0 or not reply.get("success"):
        told = str(reply.get("error-message") or done.stderr.strip() or done.stdout.strip())
        reason = " ".join(told.split())[-300:].rstrip(".")
        raise FedsieveError(f"`flwr {' '.join(words[:2])}` failed ({reason}); {hint}.")
    return dict(reply)


def _submit(folder: ServerFolder, job: Job) -> str:
    settings = folder.flower / "run-config.toml"
    # The server's program is started by Flower, with a token among its words, and knows no more.
    config = {**job.settings, "command": command_line()}
    write_atomically(settings, tomli_w.dumps(config).encode())
    words = ["run", str(job.app), CONNECTION, "--run-config", str(settings)]
    reply = flwr(folder, words, f"{folder.logs / 'superlink.log'} says more")
    return str(reply["run-id"])


def _watch(
    folder: ServerFolder,
    run_id: str,
    superlink: Child,
    registry: Registry,
    guests: GuestList,
    say: Say,
    echo: Say,
) -> None:
    """Show what happens until the run has ended; a failed run is an error."""
    attendance, complain = Attendance(), Voice(say, RealClock())
    looked = time.monotonic()
    log_command = ["flwr", "log", run_id, CONNECTION, "--stream"]
    log = Child(folder, "run", log_command)
    try:
        while True:
            for line in log.news():
                echo(line)
            superlink.news()  # its log is for a file only, but must not grow for ever
            _check_alive(superlink)
            if time.monotonic() - looked >= REGISTRY_SECONDS:
                try:
                    for name in registry.update(guests):
                        say(f"{name} is admitted.")
                except FedsieveError as error:  # no reason to end the run of the others
                    complain(str(error))
                looked = time.monotonic()
            for sentence in attendance.changes(guests.seen, time.time()):
                say(sentence)
            if log.poll() is not None:
                status = _status(folder, run_id)
                if status.startswith("finished"):
                    break
                log = Child(folder, "run", log_command)
            time.sleep(POLL_SECONDS)
        for line in log.news():
            echo(line)
    finally:
        log.stop()
    if status != "finished:completed":
        # Our own programs say what is wrong in one sentence, at the end of a traceback.
        told = re.findall(r"^fedsieve\.\S+Error: (.+)", log.output(), re.MULTILINE)
        raise FedsieveError(
            told[-1]
            if told
            else f"The run did not succeed ({status}); {log.log} says why. The same command goes "
            "on from its last saved round."
        )


def _status(folder: ServerFolder, run_id: str) -> str:
    words = ["list", CONNECTION, "--run-id", run_id]
    (entry,) = flwr(folder, words, "give the same command again")["runs"]
    return str(entry["status"])


@dataclass
class Attendance:
    """Which sites are there, told when it changes."""

    _present: set[str] = field(default_factory=set)
    _known: set[str] = field(default_factory=set)

    def changes(self, seen: Mapping[str, float], now: float) -> list[str]:
        """A sentence for each site that has come, gone or come back."""
        there = {name for name, at in list(seen.items()) if now - at < SILENT_SECONDS}
        told = [
            f"{name} is back." if name in self._known else f"{name} is here."
            for name in sorted(there - self._present)
        ]
        told += [
            f"{name} has been silent for {SILENT_SECONDS:.0f} s."
            for name in sorted(self._present - there)
        ]
        self._present = there
        self._known |= there
        return told
