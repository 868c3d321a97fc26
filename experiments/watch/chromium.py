"""A real Chromium, told over a pipe what to do (the Chrome DevTools Protocol,
https://chromedevtools.github.io/devtools-protocol): nothing to install beside Debian's `chromium`.

The width is set through the protocol: `--window-size` is clamped by some builds.
"""

import base64
import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from types import TracebackType
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")
FLAGS = [
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--remote-debugging-pipe",
    "--no-first-run",
    "--disable-sync",
    "--disable-extensions",
    "--disable-quic",
    "--disable-background-networking",
    "--disable-component-update",
]
PLACE = """
import fcntl, os, sys
read, write = (fcntl.fcntl(int(n), fcntl.F_DUPFD, 10) for n in sys.argv[1:3])
os.dup2(read, 3)
os.dup2(write, 4)
os.execvp(sys.argv[3], sys.argv[3:])
"""
PATIENCE = 60.0  # seconds for an answer


def found() -> str | None:
    """The program, if there is one; $CHROMIUM names another."""
    return os.environ.get("CHROMIUM") or next(
        (path for name in NAMES if (path := shutil.which(name))), None
    )


class Chromium:
    """One browser with one tab; use it as a context."""

    def __init__(self, program: str) -> None:
        self.profile = tempfile.TemporaryDirectory(
            prefix="chromium-", ignore_cleanup_errors=True
        )
        to_read, self._to = os.pipe()
        self._from, to_write = os.pipe()
        # It reads commands from descriptor 3 and writes answers to 4.
        command = [
            sys.executable,
            "-c",
            PLACE,
            str(to_read),
            str(to_write),
            program,
            *FLAGS,
        ]
        command += [f"--user-data-dir={self.profile.name}", "about:blank"]
        self._process = subprocess.Popen(
            command, pass_fds=(to_read, to_write), stderr=subprocess.DEVNULL
        )
        os.close(to_read)
        os.close(to_write)
        self._rest, self._number, self.requests = b"", 0, list[str]()
        self._session: str | None = None
        target = self.do("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.do("Target.attachToTarget", targetId=target, flatten=True)[
            "sessionId"
        ]
        for domain in ("Page", "Network", "Runtime"):
            self.do(f"{domain}.enable")

    def __enter__(self) -> "Chromium":
        return self

    def __exit__(
        self,
        kind: type | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._process.terminate()
        self._process.wait(PATIENCE)
        self.profile.cleanup()

    def do(self, method: str, **parameters: Any) -> dict[str, Any]:
        """One command, answered."""
        self._number += 1
        message: dict[str, Any] = {
            "id": self._number,
            "method": method,
            "params": parameters,
        }
        if self._session:
            message["sessionId"] = self._session
        os.write(self._to, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._next()
            if answer.get("id") == self._number:
                if "error" in answer:
                    raise RuntimeError(f"{method}: {answer['error'].get('message')}")
                return answer["result"]

    def open(self, page: Path, width: int, scheme: str = "light") -> None:
        """A file, in a window of so many CSS pixels, light or dark; `requests` are those that it makes, itself left
        out.
        """
        self.do(
            "Emulation.setEmulatedMedia",
            features=[{"name": "prefers-color-scheme", "value": scheme}],
        )
        self.do(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=900,
            deviceScaleFactor=1,
            mobile=width < 600,
        )
        self.requests.clear()
        self.do("Page.navigate", url=page.resolve().as_uri())
        while self._next().get("method") != "Page.loadEventFired":
            pass
        own = page.resolve().as_uri()
        self.requests = [
            url for url in self.requests if url != own and not url.startswith("data:")
        ]

    def evaluate(self, script: str) -> Any:
        return self.do("Runtime.evaluate", expression=script, returnByValue=True)[
            "result"
        ].get("value")

    def picture(self, target: Path) -> None:
        """The whole page as PNG."""
        shot = self.do("Page.captureScreenshot", captureBeyondViewport=True)
        target.write_bytes(base64.b64decode(shot["data"]))

    def pdf(self, target: Path) -> int:
        """The page as printed on A4; how many sheets."""
        printed = self.do(
            "Page.printToPDF", preferCSSPageSize=True, printBackground=False
        )
        content = base64.b64decode(printed["data"])
        target.write_bytes(content)
        return content.count(b"/Type /Page\n") + content.count(
            b"/Type /Page/"
        ) or content.count(b"/Type/Page\n")

    def _next(self) -> dict[str, Any]:
        while b"\0" not in self._rest:
            more = os.read(self._from, 1 << 20)
            if not more:
                raise RuntimeError("Chromium has ended.")
            self._rest += more
        line, _, self._rest = self._rest.partition(b"\0")
        message = json.loads(line)
        if message.get("method") == "Network.requestWillBeSent":
            self.requests.append(message["params"]["request"]["url"])
        return message
