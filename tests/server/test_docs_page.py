"""The page at `/docs`: complete without any other host."""

import re
from urllib.parse import urljoin, urlsplit

from tests.server.conftest import Bench

CONTENT_TYPES = {".js": "text/javascript", ".css": "text/css", ".png": "image/png", ".json": "application/json"}


async def references(bench: Bench) -> list[str]:
    """What the page refers to, as a browser resolves it."""
    page = await bench.client.get("/docs")
    assert page.status_code == 200
    assert page.headers["content-type"].startswith("text/html")
    found = re.findall(r"""(?:src|href)\s*=\s*["']([^"']+)["']|url:\s*["']([^"']+)["']""", page.text)
    return [urljoin(str(page.url), "".join(pair)) for pair in found]


async def test_the_page_refers_to_no_other_host(bench: Bench) -> None:
    page = await bench.client.get("/docs")
    assert "//" not in re.sub(r"^\s*//.*$", "", page.text, flags=re.MULTILINE), "an absolute address"
    assert '"validatorUrl": null' in page.text
    assert {urlsplit(address).netloc for address in await references(bench)} == {"test"}


async def test_everything_the_page_refers_to_is_there_with_its_type(bench: Bench) -> None:
    addresses = await references(bench)
    assert len(addresses) == 4
    for address in addresses:
        answer = await bench.client.get(address)
        assert answer.status_code == 200, address
        assert answer.content, address
        suffix = address[address.rindex(".") :]
        assert answer.headers["content-type"].partition(";")[0] == CONTENT_TYPES[suffix]
        assert (await bench.client.head(address)).status_code == 200


async def test_no_other_file_can_be_asked_for(bench: Bench) -> None:
    for name in ("x", "__init__.py", "..%2Fmain.py", "%2e%2e/main.py"):
        answer = await bench.client.get(f"/docs/{name}")
        assert answer.status_code == 404
        assert answer.json()["error"]["code"] == "not_found"


async def test_there_is_no_second_page_that_would_load_from_elsewhere(bench: Bench) -> None:
    assert (await bench.client.get("/redoc")).status_code == 404
