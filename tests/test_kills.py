"""A few of the kills of tests/fuzz/kills.py, at counted steps: what is left is the old one or the new one."""

import re
import subprocess
import sys
from pathlib import Path


def test_killed_writers_leave_the_old_file_or_the_new_one():
    script = Path(__file__).parent / "fuzz" / "kills.py"
    done = subprocess.run(
        [sys.executable, script, "--kills", "4", "--only-steps"], capture_output=True, text=True, timeout=300
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert re.findall(r": (\d+) kills: ", done.stdout) == ["4"] * 4  # capture, page, model, and model without exchange
