"""The body of /v1/embeddings as an EmbeddingRequest, and how the vectors are to be written."""

from typing import Any

from frontend_svc.http.completion_request import read_prompts
from frontend_svc.http.fields import Fields, boolean, refuse, string
from frontend_svc.http.request_fields import finish, make_ids, take_scheduling
from frontend_svc.request import EmbeddingRequest

ID_PREFIX = "embd-"
ENCODINGS = ("float", "base64")
# What the journey calls the inputs.
NAMES = {"texts": "input"}
_UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    "dimensions": (),
    "messages": (),
    "truncate_prompt_tokens": (),
    "data_parallel_rank": (),
    "add_special_tokens": (True,),
}


def parse_embedding(values: dict[str, Any], request_id: str, max_inputs: int) -> tuple[EmbeddingRequest, str]:
    """Reads a body of at most so many inputs; the request and its encoding. Raises InvalidRequestError.

    Vectors are normalised unless the body says otherwise, which is what OpenAI's are.
    """
    fields = Fields(values)
    ids = make_ids(ID_PREFIX, fields, request_id)
    encoding = fields.take_or("encoding_format", string, default=ENCODINGS[0])
    if encoding not in ENCODINGS:
        raise refuse("encoding_format", " or ".join(ENCODINGS), repr(encoding[:40]))
    fields.refuse_unsupported(_UNSUPPORTED)
    request = EmbeddingRequest(
        request_id=ids.request,
        model=fields.take_or("model", string, default=""),
        inputs=tuple(read_prompts("input", fields.require("input", lambda _, value: value), max_inputs)),
        pooling=fields.take_or("pooling", string, default=""),
        normalize=fields.take_or("normalize", boolean, default=True),
        **take_scheduling(fields),
    )
    finish(fields, {})
    return request, encoding
