"""Programs end as they should: no signal, no process left behind, nothing left in shared memory or temporary folders.

`SHARDWRIGHT_BUDGET=full` runs every example under torchrun 20 times; otherwise one of them, twice.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
FULL = os.environ.get("SHARDWRIGHT_BUDGET") == "full"
TIMES = 20 if FULL else 2
EXAMPLES = sorted(path.name for path in (ROOT / "examples").glob("[0-9][0-9]_*.py"))


def left_in_shared_memory() -> set[str]:
    folder = Path("/dev/shm")
    return {path.name for path in folder.glob("*shardwright*")} if folder.is_dir() else set()


def processes_of(session: int) -> list[int]:
    """Return the processes of a session that still run."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            fields = (entry / "stat").read_text().rpartition(")")[2].split()
        except (FileNotFoundError, ProcessLookupError):
            continue  # it has just ended
        if int(fields[3]) == session and fields[0] != "Z":
            found.append(int(entry.name))
    return found


@pytest.mark.skipif(sys.platform != "linux", reason="looks at /proc and /dev/shm")
def test_leftover_processes_and_shared_memory_files_are_detected() -> None:
    before = left_in_shared_memory()
    planted = Path(f"/dev/shm/shardwright-planted-{os.getpid()}")
    program = subprocess.Popen(["sleep", "60"], start_new_session=True)
    try:
        planted.touch()
        assert left_in_shared_memory() - before == {planted.name}
        assert processes_of(program.pid) == [program.pid]
    finally:
        program.kill()
        program.wait()
        planted.unlink()
    assert processes_of(program.pid) == []


@pytest.mark.skipif(sys.platform != "linux", reason="looks at /proc and /dev/shm")
@pytest.mark.timeout(3000 if FULL else 300)
@pytest.mark.parametrize("name", EXAMPLES if FULL else EXAMPLES[:1])
def test_an_example_exits_regularly_and_leaves_nothing(name: str, tmp_path: Path) -> None:
    environment = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")}
    for number in range(TIMES):
        folder = tmp_path / str(number)
        folder.mkdir()
        before = left_in_shared_memory()
        program = subprocess.Popen(
            [
                *(sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"),
                str(ROOT / "examples" / name),
            ],
            env=environment | {"OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR", "TMPDIR": str(folder)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        output, _ = program.communicate(timeout=140)
        assert program.returncode == 0, output
        assert "Signal" not in output, output
        deadline = time.monotonic() + 5
        while processes_of(program.pid) and time.monotonic() < deadline:
            time.sleep(0.05)  # torchrun's own helpers may need a moment
        assert processes_of(program.pid) == []
        assert left_in_shared_memory() <= before
        assert [path.name for path in folder.iterdir() if "shardwright" in path.name] == []
