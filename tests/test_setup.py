"""The set-up commands on machines that are not as one would wish."""

import re
import shutil
import socket
import stat
import subprocess
import urllib.request

import pytest
from chromium import started_lab
from lessons import ROOT

# A stand-in for Python: it knows its version, makes "environments" that hold a copy of itself, and
# records what pip is asked to do. Where $RECORD.uv is, pip can bring uv.
FAKE_PYTHON = """#!/bin/sh
here=$(dirname "$0")
case "$*" in
    *"version_info < (3, 12)"*) exit {too_old} ;;
    --version) echo "Python {version}" ;;
    "-m venv "*) mkdir -p "$3/bin" && cp "$0" "$3/bin/python" && touch "$3/pyvenv.cfg" ;;
    "-m pip install "*" uv") cp "$RECORD.uv" "$here/uv" ;;
    "-m pip install "*) echo "pip install $*" >>"$RECORD"; [ ! -e "$RECORD.broken" ] ;;
esac
"""
FAKE_UV = """#!/bin/sh
echo "uv install $* index=$UV_DEFAULT_INDEX more=$UV_INDEX links=$UV_FIND_LINKS none=$UV_NO_INDEX" >>"$RECORD"
[ ! -e "$RECORD.broken_uv" ]
"""


class Machine:
    """A copy of the set-up files, and a PATH with exactly the Pythons that a test asks for."""

    def __init__(self, folder):
        self.root, self.path, self.record = folder / "repository", folder / "bin", folder / "record"
        (self.root / "helpers").mkdir(parents=True)
        self.path.mkdir()
        for name in ("helpers/setup_environment.sh", "pyproject.toml", "constraints.txt"):
            shutil.copy(ROOT / name, self.root / name)
        for tool in ("sh", "dirname", "cat", "cksum", "sed", "rm", "cp", "ls", "mkdir", "touch"):
            (self.path / tool).symlink_to(shutil.which(tool))

    def add_python(self, name, version="3.12.1", text=FAKE_PYTHON):
        too_old = int(tuple(map(int, version.split(".")[:2])) < (3, 12))
        self.add_program(self.path / name, text.replace("{too_old}", str(too_old)).replace("{version}", version))

    def add_program(self, path, text):
        path.write_text(text)
        path.chmod(path.stat().st_mode | stat.S_IXUSR)

    def note(self, name, text=""):
        """A file by which a test tells the stand-ins how to behave."""
        path = self.record.with_name(f"record.{name}")
        path.write_text(text)
        return path

    def run(self, *arguments, **environment):
        environment |= {"PATH": str(self.path), "HOME": str(self.root), "RECORD": str(self.record)}
        command = [shutil.which("sh"), "helpers/setup_environment.sh", *arguments]
        return subprocess.run(command, cwd=self.root, env=environment, capture_output=True, text=True, check=False)

    def recorded(self):
        return self.record.read_text().splitlines() if self.record.exists() else []


@pytest.fixture
def machine(tmp_path):
    return Machine(tmp_path)


def test_an_old_python_and_a_shim_that_does_not_run_are_passed_over(machine):
    machine.add_python("python3", "3.11.7")
    machine.add_python("python3.13", text="#!/bin/sh\necho 'pyenv: python3.13: command not found' >&2\nexit 127\n")
    machine.add_python("python3.12", "3.12.1")
    assert machine.run("--find").stdout.strip() == str(machine.path / "python3.12")


def test_without_a_suitable_python_it_says_what_to_install(machine):
    machine.add_python("python3", "3.11.7")
    result = machine.run(".venv")
    assert result.returncode != 0
    assert "needs Python 3.12 or newer" in result.stderr and "install uv" in result.stderr
    assert "apt install python3.12" not in result.stderr  # no Debian has that package
    assert not (machine.root / ".venv").exists()


def test_a_failed_installation_is_said_and_repaired(machine):
    machine.add_python("python3.12")
    broken = machine.note("broken")
    result = machine.run(".venv")
    assert result.returncode != 0 and "did not finish" in result.stderr
    broken.unlink()
    assert machine.run(".venv").returncode == 0
    assert len(machine.recorded()) == 2


def test_uv_installs_where_it_is_and_pip_where_uv_fails(machine):
    machine.add_python("python3.12")
    machine.add_program(machine.path / "uv", FAKE_UV)
    assert machine.run(".venv").returncode == 0
    (line,) = machine.recorded()
    assert line.startswith("uv install pip install ") and "--editable .[test]" in line
    assert "--python .venv/bin/python --constraint .venv/constraints.txt" in line
    assert line.endswith("index= more= links= none=")
    (machine.root / ".venv" / "complete").unlink()
    machine.note("broken_uv")
    result = machine.run(".venv")
    assert result.returncode == 0 and "did not finish" not in result.stderr
    assert [line.split()[0] for line in machine.recorded()] == ["uv", "uv", "pip"]


DAMAGE = {
    "the stamp is missing": lambda root: (root / ".venv" / "complete").unlink(),
    "python is gone": lambda root: (root / ".venv" / "bin" / "python").unlink(),
    "python does not run": lambda root: (root / ".venv" / "bin" / "python").write_text("#!/bin/sh\nexit 1\n"),
    "new pins": lambda root: (root / "constraints.txt").write_text("jax==0.12.1\n"),
    # An environment knows the folder of the series by its path: in another, `import helpers` fails.
    "another name": lambda root: root.rename(root.with_name("flash attention, renamed ü")),
}


@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE)
def test_a_half_made_environment_is_made_again(machine, damage):
    machine.add_python("python3.12")
    machine.run(".venv")
    damage(machine.root)
    (machine.root,) = machine.root.parent.glob("*/helpers/..")
    for _ in range(2):
        assert machine.run(".venv").returncode == 0
    assert len(machine.recorded()) == 2


def test_a_folder_that_is_no_environment_is_left_alone(machine):
    machine.add_python("python3.12")
    precious = machine.root / ".venv" / "thesis.txt"
    precious.parent.mkdir()
    precious.write_text("years of work")
    result = machine.run(".venv")
    assert result.returncode != 0 and "is not a virtual environment" in result.stderr
    assert precious.read_text() == "years of work"


@pytest.mark.full
def test_make_lab_says_one_address_what_to_click_and_how_to_stop(tmp_path):
    """And nothing else, but for a port that is in use."""
    with socket.socket() as other:
        other.bind(("localhost", 0))
        other.listen()
        port = other.getsockname()[1]
        with started_lab(tmp_path, tmp_path, f"--port={port}") as text:
            (address,) = re.findall(r"http://\S+", text)
            assert re.fullmatch(r"http://localhost:\d+/lab/tree/workbook/00_start_here.ipynb\?token=\w{20,}", address)
            assert f"because {port} is in use" in text and "Shift+Enter" in text and "Ctrl+C here" in text
            assert "LabApp]" not in text and "ServerApp]" not in text
            assert "/login" not in urllib.request.urlopen(address).url
            assert "/login" in urllib.request.urlopen(address.partition("?")[0]).url
