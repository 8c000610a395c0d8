"""deploy/: the systemd unit and the container, read as systemd and Docker would."""

from __future__ import annotations

import fnmatch
import http.server
import os
import re
import shlex
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).resolve().parent.parent
DEPLOY = ROOT / "deploy"
UNIT = DEPLOY / "flashmoe.service"
DOCKERFILE = DEPLOY / "Dockerfile"


# systemd


def unit(path: Path) -> dict[str, dict[str, list[str]]]:
    """Section to name to values; a name may be given more than once."""
    found: dict[str, dict[str, list[str]]] = {}
    section: dict[str, list[str]] = {}
    for line in path.read_text("utf-8").splitlines():
        if not line or line.startswith(("#", ";")):
            continue
        if line.startswith("["):
            section = found.setdefault(line.strip("[]"), {})
            continue
        name, _, value = line.partition("=")
        section.setdefault(name, []).append(value)
    return found


def test_the_unit_runs_as_nobody_in_particular() -> None:
    service = unit(UNIT)["Service"]
    assert service["DynamicUser"] == ["yes"]
    assert service["ProtectSystem"] == ["strict"]
    assert service["CapabilityBoundingSet"] == [""]
    for name in ("NoNewPrivileges", "ProtectHome", "PrivateTmp", "RestrictSUIDSGID"):
        assert service[name] == ["yes"], name
    assert "User" not in service


def test_the_unit_bounds_memory_and_restarts() -> None:
    service = unit(UNIT)["Service"]
    assert re.fullmatch(r"[1-9][0-9]?%", service["MemoryMax"][0])
    assert service["MemorySwapMax"] == ["0"]
    assert service["Restart"] == ["on-failure"]
    assert service["RestartPreventExitStatus"] == ["2"]  # errors.py: what trying again won't mend
    assert "LimitMEMLOCK" in service and "LimitNOFILE" in service


def test_the_key_comes_from_a_file_and_no_secret_is_in_the_unit() -> None:
    service = unit(UNIT)["Service"]
    assert service["EnvironmentFile"] == ["/etc/flashmoe/flashmoe.conf", "-/etc/flashmoe/key.env"]
    commands = [line for line in UNIT.read_text("utf-8").splitlines() if line[:1] != "#"]
    assert not [line for line in commands if "API_KEY" in line or "--api-key" in line]


def test_the_settings_that_the_unit_reads_are_in_the_example() -> None:
    wanted = set(re.findall(r"\$\{?([A-Z_]+)", unit(UNIT)["Service"]["ExecStart"][0]))
    example = (DEPLOY / "flashmoe.conf.example").read_text("utf-8")
    given = dict(line.split("=", 1) for line in example.splitlines() if line[:1] not in ("#", ""))
    assert wanted == set(given) == {"FLASHMOE_OPTIONS"}
    assert "--host 127.0.0.1" in given["FLASHMOE_OPTIONS"]


@pytest.mark.parametrize("name", ["flashmoe.service", "aws/boot/flashmoe-prepare.service"])
def test_systemd_accepts_the_units(name: str, tmp_path: Path) -> None:
    analyze = shutil.which("systemd-analyze")
    if analyze is None:
        pytest.skip("systemd-analyze is not installed")
    text = (DEPLOY / name).read_text("utf-8")
    # it looks whether programs are there, and these are installed elsewhere
    path = tmp_path / Path(name).name
    path.write_text(re.sub(r"^(Exec\w+=)/(opt|usr/local)/\S+", r"\1/bin/true", text, flags=re.M))
    done = subprocess.run(
        [analyze, "verify", "--man=no", str(path)], capture_output=True, text=True, timeout=60
    )
    about_ours = [line for line in done.stderr.splitlines() if "flashmoe" in line]
    assert (done.returncode, about_ours) == (0, [])


# The container


Instruction = tuple[str, list[str]]


def instructions() -> list[Instruction]:
    """Instruction and its words, lines joined and comments left out."""
    lines = [x for x in DOCKERFILE.read_text("utf-8").splitlines() if not x.startswith("#")]
    text = re.sub(r"\\\n", " ", "\n".join(lines))
    return [
        (line.split(None, 1)[0], shlex.split(line.split(None, 1)[1]))
        for line in text.splitlines()
        if line.strip()
    ]


def stages() -> list[list[Instruction]]:
    found: list[list[Instruction]] = []
    for instruction in instructions():
        if instruction[0] == "FROM":
            found.append([])
        found[-1].append(instruction)
    return found


def ignored(path: str) -> bool:
    """Whether Dockerfile.dockerignore keeps a path out; the last rule that fits counts."""
    out = False
    parents = [str(p) for p in [Path(path), *Path(path).parents]]
    for rule in (DEPLOY / "Dockerfile.dockerignore").read_text("utf-8").splitlines():
        if not rule or rule.startswith("#"):
            continue
        pattern = rule.removeprefix("!").removeprefix("**/")
        names = parents + ([Path(p).name for p in parents] if "**/" in rule else [])
        if any(fnmatch.fnmatch(name, pattern) for name in names):
            out = not rule.startswith("!")
    return out


def test_all_that_is_copied_is_there_and_not_ignored() -> None:
    copied = [
        source
        for name, words in instructions()
        if name == "COPY" and not words[0].startswith("--from")
        for source in words[:-1]
    ]
    assert {"native", "patches", "flashmoe_gguf", "pyproject.toml"} <= set(copied)
    for source in copied:
        assert (ROOT / source).exists(), source
        assert not ignored(source), source
    assert ignored(".git") and ignored("docs/CLI.md") and ignored("flashmoe_gguf/__pycache__/x.pyc")


def test_what_the_build_needs_is_copied() -> None:
    """Files that the packaging names, so that a new one is not forgotten here."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))
    needed = {project["project"]["readme"], *project["project"]["license-files"]}
    needed |= set(project["tool"]["scikit-build"]["wheel"]["packages"])
    needed |= {project["tool"]["scikit-build"]["cmake"]["source-dir"]}
    listed = (ROOT / "native" / "CMakeLists.txt").read_text("utf-8")
    needed |= {
        Path(p).parts[0] for p in re.findall(r"CURRENT_SOURCE_DIR\}/\.\./([\w./-]+)", listed)
    }
    copied = {word for name, words in stages()[0] if name == "COPY" for word in words[:-1]}
    assert needed <= copied


def test_it_has_stages_and_the_last_one_has_no_compiler() -> None:
    names = [words[words.index("AS") + 1] for name, words in instructions() if name == "FROM"]
    assert names == ["build", "export", "runtime"]
    last = " ".join(" ".join(words) for _, words in stages()[-1])
    assert "build-essential" not in last
    sources = [words[0] for name, words in stages()[-1] if name == "COPY"]
    assert sources == ["deploy/healthcheck.py"]


def test_it_runs_as_an_ordinary_user() -> None:
    last = stages()[-1]
    users = [words for name, words in last if name == "USER"]
    assert users == [["10001:10001"]]
    after = [name for name, _ in last][[name for name, _ in last].index("USER") :]
    assert "RUN" not in after and "ENTRYPOINT" in after


def test_it_holds_no_key() -> None:
    for name, words in instructions():
        if name in ("ENV", "ARG"):
            assert not [w for w in words if re.search("KEY|TOKEN|SECRET|PASSWORD", w, re.I)]


def test_the_extras_that_it_installs_exist() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    texts = DOCKERFILE.read_text("utf-8"), (DEPLOY / "aws/boot/install.sh").read_text("utf-8")
    for text in texts:
        extras = re.findall(r"\[([a-z,]+)\]\"", text)
        assert extras == ["server,hub,aws"]
        assert set(extras[0].split(",")) <= set(project["optional-dependencies"])


def test_the_health_check_is_the_one_that_is_copied() -> None:
    last = stages()[-1]
    (copied,) = (words[-1] for name, words in last if name == "COPY")
    text = DOCKERFILE.read_text("utf-8")
    assert f'CMD ["python", "{copied}"]' in text and "HEALTHCHECK" in dict(last)


class _Health(http.server.BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        allowed = self.headers.get("Authorization") == "Bearer right"
        status = {"/health": 200, "/loading": 503}.get(self.path, 404) if allowed else 401
        self.send_response(status)
        self.end_headers()
        self.wfile.write(b'{"status": "ready"}')

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture(scope="module")
def health_url() -> Iterator[str]:
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), _Health) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


@pytest.mark.parametrize(
    ("path", "key", "code"),
    [
        ("/health", "right", 0),
        ("/loading", "right", 1),
        ("/health", "wrong", 1),
        ("/health", "", 1),
    ],
)
def test_health_check(health_url: str, path: str, key: str, code: int) -> None:
    assert run_health_check(health_url + path, key) == code


def test_health_check_of_nothing() -> None:
    assert run_health_check("http://127.0.0.1:1/health", "right") == 1
    assert run_health_check("nonsense", "right") == 1


def run_health_check(url: str, key: str) -> int:
    done = subprocess.run(
        [sys.executable, str(DEPLOY / "healthcheck.py")],
        env={**os.environ, "FLASHMOE_HEALTH_URL": url, "FLASHMOE_API_KEY": key},
        capture_output=True,
        text=True,
        timeout=30,
    )
    assert done.stderr == ""
    assert "right" not in done.stdout and "wrong" not in done.stdout  # keys are not shown
    return done.returncode
