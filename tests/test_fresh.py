"""The helper that runs scripts: what it hides, no other test can see."""

import signal
import subprocess
import time

import pytest
from fresh import run_fresh, run_together


@pytest.fixture
def script(tmp_path):
    def write(code):
        (tmp_path / "script.py").write_text(code)
        return tmp_path / "script.py"

    return write


@pytest.mark.parametrize(
    ("code", "returncode", "said"),
    [
        ("print('done')", 0, ""),
        ("1 / 0", 1, "ZeroDivisionError"),
        ("import sys; sys.exit('no such thing')", 1, "no such thing"),
        ("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", -signal.SIGKILL, ""),
        ("import os, signal; os.kill(os.getpid(), signal.SIGINT)", 1, "KeyboardInterrupt"),
    ],
)
def test_ends_as_a_new_process_would(code, returncode, said, script):
    # kills: a failure that looks like success, a traceback that is lost
    done = run_fresh(script(code))
    assert done.returncode == returncode
    assert said in done.stderr
    assert done.stdout == ("done\n" if returncode == 0 else "")


def test_arguments_folder_and_variables_arrive_and_nothing_stays(script, tmp_path, monkeypatch):
    # kills: an option of the helper that is ignored, a change that the next script sees
    monkeypatch.setenv("OURS", "1")
    code = "import os, sys; print(sys.argv[1:], os.getcwd(), *map(os.environ.get, ('OURS', 'ALL', 'OWN')))"
    code = script(f"{code}; os.environ['LEFT'] = '1'; print('LEFT' in sys.modules); sys.modules['LEFT'] = sys")
    first, second = run_together([{"OWN": "3"}, {}], code, "a", 5, cwd=tmp_path, env={"ALL": "2"})
    assert first.stdout == f"['a', '5'] {tmp_path} 1 2 3\nFalse\n"
    assert second.stdout == f"['a', '5'] {tmp_path} 1 2 None\nFalse\n"


def test_a_script_that_hangs_is_ended(script):
    # kills: a suite that waits for ever, a process left behind
    begin = time.monotonic()
    with pytest.raises(subprocess.TimeoutExpired):
        run_fresh(script("import time; time.sleep(100)"), timeout=1)
    assert time.monotonic() - begin < 50
