"""The engine's program inside the sandbox: llama.cpp's server from the wheel `xllamacpp`.

Stands alone: run by path with `python -I -S -B`, it sees the standard library and xllamacpp.
Arguments: folder of xllamacpp, model, unix socket, slots, context tokens for each slot, threads.
"""

import os
import signal
import sys


def main() -> None:
    folder, model, socket = sys.argv[1:4]
    slots, context_tokens, threads = map(int, sys.argv[4:7])
    sys.path.insert(0, folder)
    import xllamacpp

    params = xllamacpp.CommonParams()
    params.model.path = model
    params.hostnames = [socket]
    params.cpuparams.n_threads = threads
    params.cpuparams_batch.n_threads = threads
    params.n_parallel = slots
    params.n_ctx = context_tokens * slots
    # One context for each slot: with a shared one, answers depend on what else is being decoded.
    params.kv_unified = False
    params.cont_batching = True
    params.cache_prompt = True
    params.use_jinja = True
    params.ui = False
    # Warnings and errors: no line for each request.
    params.verbosity = 2
    # Kept connections occupy a thread each.
    params.n_threads_http = 2 * slots + 8
    server = xllamacpp.Server(params)
    assert server is not None
    signal.sigwait([signal.SIGTERM, signal.SIGINT])
    os._exit(0)


if __name__ == "__main__":
    main()
