"""`/v1/models`: what can be asked for now, in the OpenAI shape."""

import msgspec

from potluck.gateway.serving.serving import Serving


class _Model(msgspec.Struct):
    id: str
    created: int
    owned_by: str
    context_tokens: int
    input_micro_per_mtok: int
    output_micro_per_mtok: int
    fee_basis_points: int
    ready: bool
    object: str = "model"


class _Page(msgspec.Struct):
    data: list[_Model]
    object: str = "list"


def page(serving: Serving) -> bytes:
    return msgspec.json.encode(_Page([_model(serving, name) for name in serving.table.models]))


def one(serving: Serving, name: str) -> bytes | None:
    if not serving.table.serving(name):
        return None
    return msgspec.json.encode(_model(serving, name))


def _model(serving: Serving, name: str) -> _Model:
    replicas = serving.table.serving(name)
    first = replicas[0]
    return _Model(
        id=name,
        created=serving.started_s,
        owned_by=serving.pool,
        context_tokens=min(one.context_tokens for one in replicas),
        input_micro_per_mtok=first.price.input_micro_per_mtok,
        output_micro_per_mtok=first.price.output_micro_per_mtok,
        fee_basis_points=first.price.fee_basis_points,
        ready=any(one.usable for one in replicas),
    )
