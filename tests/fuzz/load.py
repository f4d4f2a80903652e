"""Many clients at once against a server of `regard serve` in a process of its own, on loopback. Exits with 1 for a 5xx,
an answer that did not come, a server that no longer answers, or memory that grows and grows.

    python tests/fuzz/load.py                                   # 100 clients for 60 s
    python tests/fuzz/load.py --clients 20 --seconds 5 --seed 7

Each client asks questions at random over one connection, has texts read, sends what is wrong, and leaves in the middle
now and then.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import secrets
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from http.client import HTTPConnection, HTTPException
from pathlib import Path

TESTS = Path(__file__).resolve().parents[1]
TEXTS = [
    "The animal did not cross the street.",
    "Seoul is the capital of Korea.",
    "서울은 한국의 수도이다.",
    "street " * 30,
]
PATIENCE = 60.0  # seconds in which every answer must come
GROWTH = 200 << 20  # bytes that the second half of a run may need beyond the first


@dataclass
class Tally:
    """What came back: how often each status, what did not come, and the slowest answer in seconds."""

    statuses: Counter[int] = field(default_factory=Counter)
    lost: list[str] = field(default_factory=list)
    jobs: Counter[str] = field(default_factory=Counter)
    slowest: float = 0.0
    lock: threading.Lock = field(default_factory=threading.Lock)

    def add(self, status: int, seconds: float) -> None:
        with self.lock:
            self.statuses[status] += 1
            self.slowest = max(self.slowest, seconds)

    @property
    def failures(self) -> int:
        return sum(count for status, count in self.statuses.items() if status >= 500) + len(self.lost)


@dataclass
class Client:
    """One client with a connection that it keeps."""

    port: int
    token: str
    tally: Tally
    dice: random.Random
    connection: HTTPConnection | None = None

    def ask(self, verb: str, path: str, body: bytes | None = None) -> bytes:
        """The body of an answer; b"" where none came, which is noted.

        As a browser does, it asks again over a new connection where the old one was closed meanwhile.
        """
        headers = {"Authorization": f"Bearer {self.token}", "Content-Type": "application/json"}
        for fresh in (self.connection is None, True):
            try:
                self.connection = self.connection or HTTPConnection("127.0.0.1", self.port, timeout=PATIENCE)
                start = time.monotonic()
                self.connection.request(verb, path, body, headers)
                answer = self.connection.getresponse()
                read = answer.read()
            except (OSError, HTTPException) as error:
                self.hang_up()
                if fresh:
                    self.tally.lost.append(f"{verb} {path[:60]}: {error!r}")
                    return b""
                continue  # it was closed while nobody asked
            self.tally.add(answer.status, time.monotonic() - start)
            return read
        raise AssertionError

    def hang_up(self) -> None:
        if self.connection is not None:
            self.connection.close()
        self.connection = None

    def question(self) -> None:
        """Something about a session that is there, now and then out of its range."""
        sessions = json.loads(self.ask("GET", "/api/sessions") or b'{"sessions": []}')["sessions"]
        if not sessions:
            return
        session = self.dice.choice(sessions)["id"]
        at = f"layer={self.dice.randrange(3)}&head={self.dice.randrange(5)}"
        token, key = self.dice.randrange(12), self.dice.randrange(12)
        path = self.dice.choice(
            [
                "overview", "tokens", f"head?{at}", f"links?{at}", f"row?{at}&token={token}",
                f"tile?{at}&rows=0,{token + 1}&cols=0,{key + 1}", f"steps?{at}&token={token}&key={key}",
            ]
        )  # fmt: skip
        self.ask("GET", f"/api/session/{session}/{path}")

    def page(self) -> None:
        self.ask(
            "GET",
            self.dice.choice(["/", "/page/shell/main.js", "/page/shell/layout.css", "/api/models", "/openapi.json"]),
        )

    def wrong(self) -> None:
        verb, path, body = self.dice.choice(
            [
                ("POST", "/api/look", b"{"), ("POST", "/api/look", b'{"text": NaN}'), ("PUT", "/api/look", b"{}"),
                ("POST", "/api/look", b'{"text": "%b"}' % (b"x" * 1_100_000)), ("GET", "/page/../server.py", None),
                ("POST", "/api/open", bytes(self.dice.randrange(100_000))), ("GET", "/api/session/0/overview", None),
                ("POST", "/api/look_at_image", b"\x89PNG\r\n\x1a\n"), ("GET", "/api/job/0", None),
            ]
        )  # fmt: skip
        self.ask(verb, path, body)

    def read(self) -> None:
        """Have a text read, and wait for it, cancel it, or forget it."""
        started = self.ask("POST", "/api/look", json.dumps({"text": self.dice.choice(TEXTS)}).encode())
        job = json.loads(started or b"{}").get("job")
        until = time.monotonic() + PATIENCE
        leave = self.dice.random()
        while job is not None and leave > 0.1:
            line = json.loads(self.ask("DELETE" if leave < 0.2 else "GET", f"/api/job/{job}") or b"{}")
            if line.get("state", "lost") not in ("loading", "reading"):
                self.tally.jobs[line.get("state", "forgotten")] += 1  # only the last 64 jobs are remembered
                return
            if time.monotonic() > until:
                self.tally.lost.append(f"job {job} did not end: {line}")
                return
            time.sleep(0.05)

    def leave(self) -> None:
        """Hang up in the middle of a request."""
        self.hang_up()
        head = f"POST /api/open HTTP/1.1\r\nHost: 127.0.0.1:{self.port}\r\nAuthorization: Bearer {self.token}\r\n"
        with socket.create_connection(("127.0.0.1", self.port), timeout=PATIENCE) as left:
            left.sendall(f"{head}Content-Length: 99999\r\n\r\nhalf of it".encode()[: self.dice.randrange(1, 200)])

    def go_on(self, more: Callable[[int], bool]) -> None:
        """Act at random for as long as there is more."""
        acts = [(self.question, 70), (self.page, 12), (self.wrong, 8), (self.read, 6), (self.leave, 4)]
        done = 0
        try:
            while more(done):
                (act,) = self.dice.choices([act for act, _ in acts], [weight for _, weight in acts])
                act()
                done += 1
        except Exception as error:  # a client that ends early must not look like one that was content
            self.tally.lost.append(f"a client ended: {error!r}")
        finally:
            self.hang_up()


def load(port: int, token: str, clients: int, seed: int, more: Callable[[int], bool]) -> Tally:
    """What so many clients got.

    more: of a number of acts, whether a client goes on after it.
    """
    tally = Tally()
    threads = [
        threading.Thread(target=Client(port, token, tally, random.Random(f"{seed} {n}")).go_on, args=(more,))
        for n in range(clients)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return tally


def resident(process: int) -> int:
    """Bytes of memory that a process holds; 0 where the system does not say."""
    try:
        return int(re.search(r"VmRSS:\s+(\d+) kB", Path(f"/proc/{process}/status").read_text())[1]) << 10  # type: ignore[index]
    except OSError:
        return 0


def main() -> int:
    """Start a server, load it, and judge."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", type=int, default=100)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    sys.path.insert(0, str(TESTS))
    from speaking_twins import bert

    token = secrets.token_hex(16)
    with tempfile.TemporaryDirectory(prefix="regard-load-") as folder:
        model = bert(Path(folder) / "tiny-bert", "Model")
        command = [sys.executable, "-m", "regard", "serve", "--no-open", "--model", str(model), TEXTS[0]]
        environment = os.environ | {"REGARD_TOKEN": token, "PYTHONPATH": str(TESTS.parent), "LC_ALL": "C.UTF-8"}
        server = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)
        try:
            assert server.stdout is not None
            port = int(re.search(r":(\d+)/", server.stdout.readline())[1])  # type: ignore[index]
            held: list[int] = []
            ended = threading.Event()

            def sample() -> None:
                while not ended.wait(0.5):
                    held.append(resident(server.pid))

            sampler = threading.Thread(target=sample)
            sampler.start()
            until = time.monotonic() + given.seconds
            tally = load(port, token, given.clients, given.seed, lambda done: time.monotonic() < until)
            ended.set()
            sampler.join()
            before = Counter(tally.statuses)
            Client(port, token, tally, random.Random(0)).ask("GET", "/api/sessions")
            answers = (tally.statuses - before)[200] == 1
        finally:
            server.send_signal(signal.SIGINT)
            server.wait(PATIENCE)
    half = len(held) // 2
    grown = max(held[half:], default=0) - max(held[:half], default=0)
    print(f"{given.clients} clients, {given.seconds:g} s, seed {given.seed}: {sum(tally.statuses.values()):,} answers")
    print("statuses:", ", ".join(f"{status} × {count:,}" for status, count in sorted(tally.statuses.items())))
    print("jobs:", ", ".join(f"{state} × {count}" for state, count in sorted(tally.jobs.items())))
    print(f"slowest answer: {tally.slowest:.2f} s; answers afterwards: {'yes' if answers else 'NO'}")
    print(f"memory: at most {max(held, default=0) / 2**20:.0f} MiB; second half of the run: {grown / 2**20:+.0f} MiB")
    for line in tally.lost[:20]:
        print("lost:", line)
    return 0 if not tally.failures and answers and grown <= GROWTH else 1


if __name__ == "__main__":
    sys.exit(main())
