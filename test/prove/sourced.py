"""A ROS that is already sourced: `colcon build` alone works against it, and `make setup` uses it.

Makes a second ROS prefix outside the checkout, copies the checkout, and does what a robot's engineer would do.
Takes minutes.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
# An engineer's shell: nothing of this checkout's own environment in it.
KEPT = (
    "HOME",
    "LANG",
    "PATH",
    "PIP_CERT",
    "PIP_CONFIG_FILE",
    "PIP_FIND_LINKS",
    "PIP_INDEX_URL",
    "SSL_CERT_FILE",
    "TERM",
)

# {ros}: the prefix; {copy}: the checkout; each is one shell, and all but the first have the prefix sourced.
ALONE = """
colcon build
source install/setup.bash
python3 -m pip install -q -c requirements/run.txt msgspec pyzmq pyyaml pillow
cd /
python3 -c "
import phyai_policy.msg, phyai_engine, phyai_ros.policy_node, rclpy
assert phyai_policy.__file__.startswith('{copy}/install/'), phyai_policy.__file__
assert rclpy.__file__.startswith('{ros}/'), rclpy.__file__
print(phyai_policy.msg.ActionChunk().horizon, rclpy.__file__)"
"""
SETUP = """
make setup
test ! -e .venv
test -z "$(find .venv-sourced/lib/python3*/site-packages -maxdepth 1 -iname 'ros_*.dist-info')"
"""
AGAIN = "make setup | grep 'up to date'"
USE = """
source .venv-sourced/env.sh
cd /
python -c "
import sys, phyai_policy.msg, phyai_engine, rclpy
assert sys.prefix == '{copy}/.venv-sourced', sys.prefix
assert phyai_policy.__file__.startswith('{copy}/install-sourced/'), phyai_policy.__file__
assert rclpy.__file__.startswith('{ros}/'), rclpy.__file__
rclpy.init(); node = rclpy.create_node('x'); node.create_publisher(phyai_policy.msg.ActionChunk, 'x', 1)
rclpy.shutdown()
print(rclpy.__file__)"
"""
TESTS = "make test-ros ARGS='-q -k convert'"


def shell(text: str, folder: Path, environment: dict[str, str]) -> float:
    """Run one bash script to its end; its seconds. Ends the program if it fails."""
    began = time.monotonic()
    done = subprocess.run(["bash", "-eo", "pipefail", "-c", text], cwd=folder, env=environment, check=False)
    if done.returncode:
        sys.exit(f"failed with exit code {done.returncode}:\n{text}")
    return time.monotonic() - began


def copy_checkout(folder: Path) -> None:
    """What a commit of the present state would hold."""
    folder.mkdir()
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"],
        cwd=ROOT,
        capture_output=True,
        check=True,
    )
    names = [name for name in listed.stdout.split(b"\0") if name and (ROOT / name.decode()).is_file()]
    packed = subprocess.run(
        ["tar", "-c", "--null", "-T", "-"], cwd=ROOT, input=b"\0".join(names), capture_output=True, check=True
    )
    subprocess.run(["tar", "-x"], cwd=folder, input=packed.stdout, check=True)


def main() -> None:
    environment = {name: os.environ[name] for name in KEPT if name in os.environ}
    rows = []
    with tempfile.TemporaryDirectory(prefix="phyai-sourced-") as temporary:
        ros, copy = Path(temporary) / "ros", Path(temporary) / "checkout"
        copy_checkout(copy)
        make = f"{sys.executable} requirements/bootstrap.py --prefix {ros}"
        rows.append(("a ROS prefix outside the checkout", shell(make, copy, environment)))
        source = f"source {ros}/setup.bash\n"
        for title, text in (
            ("colcon build alone", ALONE),
            ("make setup", SETUP),
            ("make setup again", AGAIN),
            ("import and publish", USE),
            ("tests", TESTS),
        ):
            seconds = shell(source + text.replace("{ros}", str(ros)).replace("{copy}", str(copy)), copy, environment)
            rows.append((title, seconds))
            if title == "make setup again" and seconds > 5:
                sys.exit(f"make setup took {seconds:.1f} s with nothing changed; 5 s are promised")
    print("\n| step against a sourced ROS | s |\n|---|---|")
    for title, seconds in rows:
        print(f"| {title} | {seconds:.1f} |")


if __name__ == "__main__":
    main()
