"""A real browser: headless Chromium, driven by chromedriver over the WebDriver protocol."""

from __future__ import annotations

import base64
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx

KEYS = {"Home": "\ue011", "ArrowRight": "\ue014", "Tab": "\ue004", "Enter": "\ue007"}
_OPTIONS = ["--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--disable-extensions"]


class Browser:
    """One window. Elements are named by CSS selectors."""

    def __init__(self, url: str) -> None:
        self._client = httpx.Client(base_url=url, timeout=60, trust_env=False)
        options = {"args": _OPTIONS}
        wanted = {"browserName": "chrome", "goog:chromeOptions": options, "goog:loggingPrefs": {"browser": "ALL"}}
        self._session = ""
        self._session = f"/session/{self._call('POST', '/session', capabilities={'alwaysMatch': wanted})['sessionId']}"

    def _call(self, method: str, path: str, **body: Any) -> Any:
        answer = self._client.request(method, self._session + path, json=body if method == "POST" else None)
        value = answer.json()["value"]
        assert answer.is_success, value
        return value

    def open(self, url: str, width: int = 1200, height: int = 900) -> None:
        self._call("POST", "/window/rect", width=width, height=height)
        self._call("POST", "/url", url=url)

    def emulate(self, feature: str, value: str) -> None:
        """Set a feature that styles ask for, such as prefers-color-scheme."""
        media = {"features": [{"name": feature, "value": value}]}
        self._call("POST", "/goog/cdp/execute", cmd="Emulation.setEmulatedMedia", params=media)

    def run(self, script: str, *arguments: Any) -> Any:
        """Return what a script returns."""
        return self._call("POST", "/execute/sync", script=script, args=list(arguments))

    def wait(self, script: str) -> Any:
        """Return what a script returns as soon as that is something."""
        deadline = time.monotonic() + 20
        while not (found := self.run(script)):
            assert time.monotonic() < deadline, script
            time.sleep(0.05)
        return found

    def click(self, selector: str) -> None:
        self._call("POST", f"/element/{self._element(selector)}/click")

    def keys(self, selector: str, text: str) -> None:
        self._call("POST", f"/element/{self._element(selector)}/value", text=text)

    def _element(self, selector: str) -> str:
        return next(iter(self._call("POST", "/element", using="css selector", value=selector).values()))

    def errors(self) -> list[str]:
        """Return what the page's program has complained of since the last call."""
        return [
            entry["message"] for entry in self._call("POST", "/se/log", type="browser") if entry["level"] == "SEVERE"
        ]

    def screenshot(self, path: Path) -> None:
        path.write_bytes(base64.b64decode(self._call("GET", "/screenshot")))

    def close(self) -> None:
        self._call("DELETE", "")
        self._client.close()


@contextmanager
def browser() -> Iterator[Browser]:
    """Have a browser; it is gone afterwards."""
    driver = subprocess.Popen(["chromedriver", "--port=0"], stdout=subprocess.PIPE, text=True)
    try:
        assert driver.stdout is not None
        port = next(
            line.rsplit(" ", 1)[1].strip(" .\n") for line in driver.stdout if "started successfully on port" in line
        )
        window = Browser(f"http://127.0.0.1:{port}")
        try:
            yield window
        finally:
            window.close()
    finally:
        driver.terminate()
        driver.wait(20)
