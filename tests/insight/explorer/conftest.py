"""A browser for the explorer's tests; each page fails its test if it reports an error or makes a request."""

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

BROWSER = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
ARGUMENTS = [
    "--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-component-update",
    "--disable-sync", "--no-first-run",
]  # fmt: skip


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    sync_api = pytest.importorskip("playwright.sync_api", reason="the browser test needs playwright")
    if BROWSER is None:
        pytest.skip("the browser test needs chromium on the path")
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=BROWSER, args=ARGUMENTS)
        yield browser
        browser.close()


@pytest.fixture
def open_page(browser: Any) -> Iterator[Callable[..., Any]]:
    """Opens a file in a new window."""
    messages: list[str] = []
    pages: list[Any] = []

    def opened(file: Path, **options: Any) -> Any:
        page = browser.new_page(**{"viewport": {"width": 1280, "height": 900}, **options})
        pages.append(page)
        page.on("console", lambda message: messages.append(message.text))
        page.on("pageerror", lambda error: messages.append(str(error)))
        page.on("dialog", lambda dialog: messages.append(dialog.message))
        # Blob addresses are the file that the page offers for download.
        allowed = ("file:", "data:", "blob:")
        page.on("request", lambda request: request.url[:5] in allowed or messages.append(request.url))
        page.goto(file.as_uri())
        return page

    yield opened
    for page in pages:
        page.close()
    assert messages == []
