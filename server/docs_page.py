"""`/docs`: Swagger UI over `/openapi.json`, from files that came with a package: nothing is fetched from elsewhere.

Knows which files the page needs; knows nothing of what the document says. All addresses are relative, so the page also
works behind a proxy that puts a prefix before it.
"""

from importlib import resources
from pathlib import Path

from fastapi import APIRouter
from fastapi.openapi.docs import get_swagger_ui_html
from starlette.exceptions import HTTPException
from starlette.responses import FileResponse, HTMLResponse

MEDIA_TYPES = {
    "swagger-ui-bundle.js": "text/javascript",
    "swagger-ui.css": "text/css",
    "favicon-32x32.png": "image/png",
}

router = APIRouter(include_in_schema=False)


@router.get("/docs")
async def docs() -> HTMLResponse:
    """The page."""
    return get_swagger_ui_html(
        openapi_url="openapi.json",
        title="Quire",
        swagger_js_url="docs/swagger-ui-bundle.js",
        swagger_css_url="docs/swagger-ui.css",
        swagger_favicon_url="docs/favicon-32x32.png",
        swagger_ui_parameters={"validatorUrl": None},  # by default the page asks an outside service to check it
    )


@router.get("/docs/{name}")
async def docs_file(name: str) -> FileResponse:
    """A file of the page. Raises HTTPException (404) for any other name."""
    if name not in MEDIA_TYPES:
        raise HTTPException(404)
    return FileResponse(_folder() / name, media_type=MEDIA_TYPES[name])


def _folder() -> Path:
    """Looked for only when asked for, so that a start does not pay for it."""
    return Path(str(resources.files("fastapi_swagger"))) / "resources"
