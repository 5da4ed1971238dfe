"""A real headless Chromium, driven over its own DevTools protocol; it reaches loopback only."""

import asyncio
import base64
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any, Final

import aiohttp

CHROMIUM: Final = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None
)
FLAGS: Final = (
    *("--headless=new", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-extensions"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
    *("--disable-dev-shm-usage", "--no-proxy-server", "--remote-debugging-port=0"),
    "--host-resolver-rules=MAP * ~NOTFOUND , EXCLUDE 127.0.0.1",
)
WAIT_S: Final = 30.0


@dataclass(slots=True)
class Page:
    """One tab. `messages`: what its script logged, and what its policy blocked."""

    socket: aiohttp.ClientWebSocketResponse
    messages: list[str] = field(default_factory=list)
    requested: list[str] = field(default_factory=list)
    _numbers: Any = field(default_factory=count)

    async def call(self, method: str, **params: object) -> dict[str, Any]:
        """The result of a DevTools method; events that come meanwhile are noted."""
        number = next(self._numbers)
        await self.socket.send_json({"id": number, "method": method, "params": params})
        async with asyncio.timeout(WAIT_S):
            while (said := await self.socket.receive_json()).get("id") != number:
                self._note(said)
        assert "error" not in said, said
        result: dict[str, Any] = said["result"]
        return result

    def _note(self, event: dict[str, Any]) -> None:
        params = event.get("params", {})
        match event.get("method"):
            case "Runtime.consoleAPICalled":
                self.messages.append(str(params["args"]))
            case "Runtime.exceptionThrown":
                self.messages.append(str(params["exceptionDetails"]))
            case "Log.entryAdded":
                self.messages.append(params["entry"]["text"])
            case "Network.requestWillBeSent":
                self.requested.append(params["request"]["url"])

    async def open(
        self, url: str, *, width: int = 1280, height: int = 900, dark: bool = False
    ) -> None:
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        await self.call("Emulation.setEmulatedMedia", features=[scheme])
        await self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=width < 600,
        )
        await self.call("Page.navigate", url=url)

    async def run(self, script: str) -> Any:
        """The value of an expression."""
        said = await self.call("Runtime.evaluate", expression=script, returnByValue=True)
        assert "exceptionDetails" not in said, said
        return said["result"].get("value")

    async def until(self, condition: str) -> None:
        """Waits for an expression to become true."""
        async with asyncio.timeout(WAIT_S):
            while not await self.run(f"Boolean({condition})"):  # noqa: ASYNC110
                await asyncio.sleep(0.05)

    async def text(self) -> str:
        return str(await self.run("document.body.innerText"))

    async def screenshot(self) -> bytes:
        """The whole page as a PNG."""
        said = await self.call("Page.captureScreenshot", captureBeyondViewport=True)
        return base64.b64decode(said["data"])


@asynccontextmanager
async def browsing(profile: Path) -> AsyncIterator[Page]:
    """An empty tab of a browser with a new profile in `profile`."""
    assert CHROMIUM is not None
    process = await asyncio.create_subprocess_exec(
        CHROMIUM,
        *FLAGS,
        f"--user-data-dir={profile}",
        "about:blank",
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        async with (
            aiohttp.ClientSession() as session,
            session.ws_connect(await _tab(profile, session), max_msg_size=0) as socket,
        ):
            page = Page(socket)
            for domain in ("Page", "Runtime", "Log", "Network"):
                await page.call(f"{domain}.enable")
            yield page
            with suppress(aiohttp.ClientError, TypeError):
                await page.call("Browser.close")
    finally:
        with suppress(TimeoutError):
            async with asyncio.timeout(5):
                await process.wait()
        if process.returncode is None:
            process.kill()
            await process.wait()


async def _tab(profile: Path, session: aiohttp.ClientSession) -> str:
    """The address of the first tab, once the browser has said where it listens."""
    told = profile / "DevToolsActivePort"
    async with asyncio.timeout(WAIT_S):
        while not (told.is_file() and told.read_text().strip()):  # noqa: ASYNC110
            await asyncio.sleep(0.05)
        port = told.read_text().split()[0]
        while True:
            async with session.get(f"http://127.0.0.1:{port}/json/list") as reply:
                tabs = [it for it in await reply.json() if it["type"] == "page"]
            if tabs:
                return str(tabs[0]["webSocketDebuggerUrl"])
            await asyncio.sleep(0.05)
