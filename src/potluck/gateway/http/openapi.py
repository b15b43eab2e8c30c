"""What `/api/v1` says of itself: OpenAPI from the views, and its reader, all from this machine."""

import re
from typing import Any, Final

import msgspec
from fastapi import FastAPI, Response
from fastapi.openapi.docs import get_swagger_ui_html
from fastapi.openapi.utils import get_openapi
from fastapi.staticfiles import StaticFiles
from swagger_ui_bundle import swagger_ui_path

from potluck.gateway.http.gate import PREFIX
from potluck.messages import views

_SHOWN: Final[dict[str, Any]] = {
    "/status": views.StatusView,
    "/nodes": views.Page[views.NodeView],
    "/models": views.Page[views.ModelView],
    "/accounts": views.Page[views.AccountView],
    "/accounts/{account}": views.AccountView,
    "/accounts/{account}/deposit": views.AccountView,
    "/keys": views.Page[views.KeyView],
    "/keys/{key}": views.KeyView,
    "/receipts": views.Page[views.ReceiptLineView],
    "/receipts/{receipt}": views.ReceiptView,
    "/ledger": views.Page[views.TransferView],
    "/holds": views.Page[views.HoldView],
    "/events": views.Page[views.EventView],
    "/whoami": views.KeyView,
}
_CREATED: Final[dict[str, Any]] = {
    "/accounts": views.AccountView,
    "/keys": views.CreatedKeyView,
}


def add(api: FastAPI) -> None:
    made: dict[str, Any] = {}

    @api.get(PREFIX + "/openapi.json", include_in_schema=False)
    async def openapi() -> Response:
        if not made:
            made.update(_document(api))
        return Response(msgspec.json.encode(made), media_type="application/json")

    @api.get(PREFIX + "/docs", include_in_schema=False)
    async def docs() -> Response:
        return get_swagger_ui_html(
            openapi_url=PREFIX + "/openapi.json",
            title="Potluck",
            swagger_js_url=PREFIX + "/docs/files/swagger-ui-bundle.js",
            swagger_css_url=PREFIX + "/docs/files/swagger-ui.css",
            swagger_favicon_url=PREFIX + "/docs/files/favicon-32x32.png",
            # Otherwise the page of a pool with a public name asks a validator elsewhere.
            swagger_ui_parameters={"validatorUrl": None},
        )

    api.mount(PREFIX + "/docs/files", StaticFiles(directory=str(swagger_ui_path)))


def _document(api: FastAPI) -> dict[str, Any]:
    document = get_openapi(title=api.title, version=api.version, routes=api.routes)
    shown = [*_SHOWN.values(), *_CREATED.values()]
    schemas, components = msgspec.json.schema_components(
        shown, ref_template="#/components/schemas/{name}"
    )
    reads = dict(zip(_SHOWN, schemas, strict=False))
    creations = dict(zip(_CREATED, schemas[len(_SHOWN) :], strict=True))
    found = document.setdefault("components", {}).setdefault("schemas", {})
    found.update(components)
    for path, methods in document["paths"].items():
        short = path.removeprefix(PREFIX)
        short = re.sub(r"\{revoked\}", "{key}", short)
        for method, operation in methods.items():
            creation = method == "post" and short in _CREATED
            schema = creations[short] if creation else reads.get(short, {})
            status = "201" if creation else "200"
            content = {"application/json": {"schema": schema}}
            operation["responses"][status] = {"description": "As it is", "content": content}
            operation["security"] = [{"key": []}]
    document["components"]["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
    return document
