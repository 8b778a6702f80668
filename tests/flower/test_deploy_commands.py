"""The two long-running commands, with small programs in place of Flower's; and their page."""

from __future__ import annotations

import datetime
import json
import re
import shlex
import sys
import time
import tomllib
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("flwr", reason="the federation needs fedsieve[flower]")

from deploy_programs import Scripts, programs_in

from fedsieve.audit import site as audit_site
from fedsieve.cli import main
from fedsieve.deploy import server, site
from fedsieve.deploy.address import Address
from fedsieve.deploy.children import belonging_to
from fedsieve.deploy.folders import ServerFolder, SiteFolder
from fedsieve.deploy.keys import make_key
from fedsieve.deploy.knock import Answer
from fedsieve.deploy.server import Job, serve
from fedsieve.deploy.site import SiteData, take_part
from fedsieve.errors import FedsieveError
from fedsieve.ports import free_port

PAGE = Path(__file__).parents[2] / "docs" / "deploy.md"

SUPERLINK = """\
pathlib.Path(os.environ["FLWR_HOME"], "superlink.args").write_text(json.dumps(sys.argv[1:]))
pathlib.Path(sys.argv[sys.argv.index("--database") + 1]).touch()
door = socket.create_server(("127.0.0.1", int(sys.argv[sys.argv.index("--port") + 1])))
time.sleep(120)
"""
FLWR = """\
home = pathlib.Path(os.environ["FLWR_HOME"])
with (home / "flwr.args").open("a") as file:
    file.write(json.dumps(sys.argv[1:]) + "\\n")
action = sys.argv[1]
if action == "log":
    print("INFO : a line of the run")
    sys.exit()
answers = home / f"{action}.answers"
lines = answers.read_text().splitlines() if answers.exists() else []
answers.write_text("\\n".join(lines[1:]))
default = {"success": True, "run-id": "17", "node-id": 5}
default["runs"] = [{"status": "finished:completed"}]
print(lines[0] if lines else json.dumps(default))
"""


@pytest.fixture
def scripts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Scripts:
    return programs_in(tmp_path / "bin", monkeypatch)


class Heard:
    """What a command said and echoed."""

    def __init__(self) -> None:
        self.said: list[str] = []
        self.echoed: list[str] = []


class TestServer:
    @pytest.fixture(autouse=True)
    def _programs(self, scripts: Scripts, monkeypatch: pytest.MonkeyPatch) -> None:
        scripts("flower-superlink", SUPERLINK)
        scripts("flwr", FLWR)
        monkeypatch.setattr(server, "POLL_SECONDS", 0.05)
        monkeypatch.setattr(server, "REGISTRY_SECONDS", 0.0)

    @pytest.fixture
    def folder(self, tmp_path: Path) -> ServerFolder:
        folder = self.found(tmp_path / "server")
        folder.admit(make_key("site-a")[1])
        return folder

    @staticmethod
    def found(path: Path, *, insecure: bool = False) -> ServerFolder:
        now = datetime.datetime.now(datetime.UTC)
        address = Address("127.0.0.1", free_port())
        return ServerFolder.create(path, address, insecure=insecure, now=now)

    @staticmethod
    def serve(folder: ServerFolder) -> Heard:
        heard = Heard()
        job = Job(Path("app"), {"out": "/x", "sites": 1, "recipe-toml": 'name = "x"\n'})
        serve(folder, job, heard.said.append, heard.echoed.append)
        return heard

    @staticmethod
    def asked(folder: ServerFolder) -> list[list[str]]:
        lines = (folder.flower / "flwr.args").read_text().splitlines()
        return [json.loads(line) for line in lines]

    @staticmethod
    def will_answer(folder: ServerFolder, action: str, *answers: dict[str, Any]) -> None:
        folder.flower.mkdir(exist_ok=True)
        text = "\n".join(json.dumps(answer) for answer in answers)
        (folder.flower / f"{action}.answers").write_text(text)

    def test_from_start_to_end(self, folder: ServerFolder, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(sys, "argv", ["/usr/bin/fedsieve", "deploy", "server", "a b", "own"])
        heard = self.serve(folder)
        address = folder.invitation().server
        assert heard.said == [f"The server is ready for sites at {address}."]
        assert "INFO : a line of the run" in heard.echoed
        assert belonging_to(folder) == []

        link = json.loads((folder.flower / "superlink.args").read_bytes())
        assert link[:2] == ["--host", "127.0.0.1"]
        assert int(link[3]) != address.port
        assert "--enable-supernode-auth" in link
        assert "--insecure" not in link
        register, run, *_ = self.asked(folder)
        assert register[:3] == ["supernode", "register", str(folder.key_file("site-a"))]
        assert run[:3] == ["run", "app", "deploy"]
        settings = tomllib.loads((folder.flower / "run-config.toml").read_text())
        assert settings == {
            "out": "/x",
            "sites": 1,
            "recipe-toml": 'name = "x"\n',
            "command": "fedsieve deploy server 'a b' own",
        }
        connection = tomllib.loads((folder.flower / "config.toml").read_text())["superlink"]
        assert connection["deploy"] == {
            "address": f"127.0.0.1:{link[3]}",
            "root-certificates": str(folder.flower / "ca.crt"),
        }

    def test_without_encryption_on_this_machine(self, tmp_path: Path) -> None:
        folder = self.found(tmp_path / "plain", insecure=True)
        heard = self.serve(folder)
        assert heard.said[0].startswith("Without encryption and keys")
        link = json.loads((folder.flower / "superlink.args").read_bytes())
        assert "--insecure" in link
        assert "--enable-supernode-auth" not in link

    def test_a_failed_run_is_an_error(self, folder: ServerFolder) -> None:
        self.will_answer(folder, "list", {"success": True, "runs": [{"status": "finished:failed"}]})
        with pytest.raises(FedsieveError, match=r"did not succeed \(finished:failed\)"):
            self.serve(folder)
        assert belonging_to(folder) == []

    def test_a_mistake_that_the_run_found_is_told_as_such(
        self, folder: ServerFolder, scripts: Scripts
    ) -> None:
        failed = FLWR.replace("a line of the run", "x\\nfedsieve.errors.FedsieveError: Mend it.")
        scripts("flwr", failed.replace("finished:completed", "finished:failed"))
        with pytest.raises(FedsieveError, match=r"^Mend it\.$"):
            self.serve(folder)

    def test_a_log_that_breaks_off_is_taken_up_again(self, folder: ServerFolder) -> None:
        self.will_answer(folder, "list", {"success": True, "runs": [{"status": "running"}]})
        self.serve(folder)
        assert [words[0] for words in self.asked(folder)].count("log") == 2

    def test_a_site_that_cannot_be_admitted_does_not_end_the_run(
        self, folder: ServerFolder
    ) -> None:
        running = {"success": True, "runs": [{"status": "running"}]}
        self.will_answer(folder, "list", running, running)
        good = {"success": True, "node-id": 1}
        self.will_answer(folder, "supernode", good, {"success": False, "error-message": "no"}, good)
        self.serve_while_one_more_comes(folder)

    def serve_while_one_more_comes(self, folder: ServerFolder) -> None:
        heard = Heard()

        def say(sentence: str) -> None:
            heard.said.append(sentence)
            if "is ready" in sentence:
                folder.admit(make_key("site-b")[1])

        serve(folder, Job(Path("app"), {"sites": 1}), say, heard.echoed.append)
        assert "`flwr supernode register` failed (no)" in heard.said[1]
        assert heard.said[2] == "site-b is admitted."

    def test_a_superlink_that_dies_is_said(self, folder: ServerFolder, scripts: Scripts) -> None:
        scripts("flower-superlink", "sys.exit('no memory')")
        with pytest.raises(FedsieveError, match="The SuperLink has ended"):
            self.serve(folder)
        assert "no memory" in (folder.logs / "superlink.log").read_text()

    def test_a_superlink_that_does_not_come_up_is_said(
        self,
        folder: ServerFolder,
        scripts: Scripts,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        scripts("flower-superlink", "time.sleep(60)")
        monkeypatch.setattr(server, "START_SECONDS", 0.3)
        with pytest.raises(FedsieveError, match="is not up after"):
            self.serve(folder)
        assert belonging_to(folder) == []

    def test_keys_are_registered_once_for_each_database(self, folder: ServerFolder) -> None:
        def registered() -> int:
            return sum(words[:2] == ["supernode", "register"] for words in self.asked(folder))

        self.serve(folder)
        self.serve(folder)
        assert registered() == 1
        (folder.flower / "superlink.db").unlink()
        self.serve(folder)
        assert registered() == 2

    def test_the_certificate_is_made_anew_at_each_start(self, folder: ServerFolder) -> None:
        self.serve(folder)
        first = (folder.flower / "server.crt").read_bytes()
        self.serve(folder)
        assert (folder.flower / "server.crt").read_bytes() != first


class Over(Exception):  # noqa: N818
    """The test has seen enough."""


class CountingClock:
    """Real time, in small steps, until a long wait comes."""

    def __init__(self) -> None:
        self.waits: list[float] = []

    def now(self) -> float:
        return time.monotonic()

    def sleep(self, seconds: float) -> None:
        if seconds == site.POLL_SECONDS:
            time.sleep(0.02)
            return
        self.waits.append(seconds)
        if len(self.waits) == 2:
            raise Over


class TestSite:
    SUPERNODE = """\
pathlib.Path(os.environ["FLWR_HOME"], "supernode.args").write_text(json.dumps(sys.argv[1:]))
print("INFO:     Started server process\\nINFO :      \\n\\nINFO :      Starting Flower SuperNode")
print("ERROR : Exit Code: 305\\nFailed to initialize the connection")
sys.exit(1)
"""

    @pytest.mark.parametrize("insecure", [False, True])
    def test_a_supernode_is_started_as_often_as_it_takes(
        self,
        tmp_path: Path,
        scripts: Scripts,
        monkeypatch: pytest.MonkeyPatch,
        insecure: bool,
    ) -> None:
        scripts("flower-supernode", self.SUPERNODE)
        founded = TestServer.found(tmp_path / "server", insecure=insecure)
        folder = SiteFolder.create(tmp_path / "a", founded.invitation(), "site-a")
        monkeypatch.setattr(site, "knock", lambda *_: Answer(True))
        heard, clock = Heard(), CountingClock()
        data = SiteData(path=tmp_path, source="folder")
        with pytest.raises(Over):
            take_part(folder, data, heard.said.append, heard.echoed.append, clock)
        assert clock.waits == [10, 10]
        assert len(heard.said) == 1
        assert "still takes this site's last connection for alive" in heard.said[0]
        assert heard.echoed[:2] == [
            "INFO :      Starting Flower SuperNode",
            "ERROR : Exit Code: 305",
        ]
        words = json.loads((folder.flower / "supernode.args").read_bytes())
        assert words[:2] == ["--superlink", str(founded.invitation().server)]
        assert ("--insecure" in words) == insecure
        assert ("--auth-supernode-private-key" in words) != insecure
        settings = tomllib.loads(Path(words[words.index("--node-config") + 1]).read_text())
        assert settings == {
            "site": "site-a",
            "state-path": str(folder.state),
            "data-path": str(tmp_path),
            "data-source": "folder",
        }
        assert SiteData(client=3).settings() == {"client": 3}
        assert belonging_to(folder) == []

    FINISHING = """\
words = pathlib.Path(sys.argv[sys.argv.index("--node-config") + 1]).read_text()
state = pathlib.Path(re.search('state-path = "(.*)"', words)[1])
(state / "own-2").mkdir()
(state / "own-2" / "review.html").write_text("new")
retry = "\\x1b[93mWARNING \\x1b[0m:   Connection attempt failed, retrying in 8.54 seconds"
print("INFO :      Sending: evaluate.finish message (ID: 1)\\nINFO :      Sent successfully")
print(retry, retry, retry, sep="\\n")
print("INFO :      Connection successful after 9.10 seconds and 3 tries.")
print(retry, "INFO :      [RUN 1]", retry, sep="\\n", flush=True)
time.sleep(1)
print("ERROR : Exit Code: 606\\nanother version")
sys.exit(1)
"""

    def test_its_terminal_says_when_results_are_there_and_when_the_server_is_not(
        self, tmp_path: Path, scripts: Scripts, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Once for each run and each silence; nothing of results that were there before."""
        scripts("flower-supernode", f"import re\n{self.FINISHING}")
        founded = TestServer.found(tmp_path / "server")
        folder = SiteFolder.create(tmp_path / "a", founded.invitation(), "site-a")
        (folder.state / "own-1").mkdir(parents=True)
        (folder.state / "own-1" / "review.html").write_text("old")
        monkeypatch.setattr(site, "knock", lambda *_: Answer(True))
        heard = Heard()
        with pytest.raises(FedsieveError, match="another version of Flower"):
            take_part(
                folder,
                SiteData(client=0),
                heard.said.append,
                heard.echoed.append,
                CountingClock(),
            )
        silent = (
            "The server does not answer (it has stopped, or the network is down); the site keeps "
            "trying."
        )
        finished = f"Finished; suspects and the review page are in {folder.state / 'own-2'}."
        assert heard.said == [finished, silent, silent]
        assert [line.split(maxsplit=2)[2] for line in heard.echoed[:4]] == [
            "Sending: evaluate.finish message (ID: 1)",
            "Sent successfully",
            "Connection successful after 9.10 seconds and 3 tries.",
            "[RUN 1]",
        ]
        assert not any("retrying" in line for line in heard.echoed)
        assert "retrying" in (folder.logs / "supernode.log").read_text()

    def test_it_looks_for_the_page_that_a_site_writes_last(self) -> None:
        assert site.REVIEW == audit_site.REVIEW


class TestPage:
    """The commands of docs/deploy.md, as printed."""

    def test_they_do_what_the_page_says(
        self,
        tmp_path: Path,
        monkeypatch: pytest.MonkeyPatch,
        capsys: pytest.CaptureFixture[str],
    ) -> None:
        blocks = re.findall(r"```\n(.*?)```", PAGE.read_text(), re.DOTALL)
        lines = [line for block in blocks for line in block.splitlines()]
        commands = [shlex.split(line)[1:] for line in lines if line.startswith("fedsieve ")]
        assert len(commands) >= 13
        monkeypatch.chdir(tmp_path)
        jobs: list[Job] = []
        sites: list[tuple[str, SiteData]] = []
        monkeypatch.setattr(server, "serve", lambda folder, job, *_: jobs.append(job))
        monkeypatch.setattr(
            site, "take_part", lambda folder, data, *_: sites.append((folder.config().name, data))
        )
        for words in commands[:-1]:
            assert main(words) == 0, f"{words}: {capsys.readouterr().err}"
        assert commands[-1][:3] == ["deploy", "remove", "server"]
        assert main([*commands[-1][:3], "site-1"]) == 0

        assert [name for name, _ in sites] == ["site-1", "site-2", "site-3"]
        for name, data in sites:
            assert data.path == Path("hospitals") / name
        (job,) = jobs
        assert job.settings["sites"] == 3
        assert job.settings["out"] == str(tmp_path / "server" / "run")
        assert tomllib.loads(job.settings["recipe-toml"])["rounds"] == 5
        assert [key.name for key in ServerFolder(Path("server")).admitted()] == ["site-2", "site-3"]

    def test_ctrl_c_has_a_sentence(
        self,
        tmp_path: Path,
        monkeypatch: pytest.MonkeyPatch,
        capsys: pytest.CaptureFixture[str],
    ) -> None:
        def stop(*_: object) -> None:
            raise KeyboardInterrupt

        monkeypatch.chdir(tmp_path)
        monkeypatch.setattr(server, "serve", stop)
        monkeypatch.setattr(site, "take_part", stop)
        (tmp_path / "one.toml").write_text("rounds = 1\n")
        main(["deploy", "init", "server", "--address", "127.0.0.1", "--insecure", "true"])
        assert main(["deploy", "server", "server", "one.toml"]) == 130
        assert "the same command goes on from there" in capsys.readouterr().err
        assert main(["deploy", "site", "anywhere", "--client", "0"]) == 0
        assert "the same command takes part again" in capsys.readouterr().err

    def test_every_message_of_the_table_is_one_that_we_say(self) -> None:
        table = PAGE.read_text().split("| message | cause | what to do |")[1]
        messages = re.findall(r"^\| (.+?) \|", table, re.MULTILINE)
        assert len(messages) >= 15
        source = " ".join(
            re.sub(r"\"\s*f?\"", "", re.sub(r"\{[^{}]*\}", "…", path.read_text()))
            for path in Path(server.__file__).parent.glob("*.py")
        )
        source = re.sub(r"\s+", " ", source)
        for message in messages:
            for part in re.split(r"\s*…\S*\s*", message):
                assert part in source, f"{message}: {part!r}"
