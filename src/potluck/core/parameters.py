"""Every tunable, named once, with its unit in its name.

A limit that is met is answered with a refusal that says which one it was. Values follow
docs/protocol/serving.md.
"""

from typing import Final

MICRO_PER_CREDIT: Final = 1_000_000
TOKENS_PER_PRICE: Final = 1_000_000
"""Prices are micro-credits per million tokens."""

# Money
starting_credit_micro: Final = 10 * MICRO_PER_CREDIT
fee_basis_points: Final = 1_000
"""10 % added on top of the provider's price, rounded down."""
price_input_micro_per_mtok: Final = 400_000
price_output_micro_per_mtok: Final = 2_000_000
hold_block_micro: Final = 1_000_000
hold_life_ms: Final = 600_000
hold_renewal_ms: Final = 120_000
hold_grace_ms: Final = 900_000
"""After a hold's life, the time in which work it covered may still report."""
hold_reply_timeout_ms: Final = 2_000
holds_per_account_max: Final = 64

# Serving
accept_timeout_ms: Final = 500
queue_timeout_ms: Final = 60_000
"""How long a request may wait on a node for a free slot, kept alive, before it is refused."""
first_token_timeout_ms: Final = 10_000
"""From the engine's start on the prompt; measured by the node."""
silence_timeout_ms: Final = 2_000
"""No frame of any kind for so long: the node is lost to this request."""
request_timeout_ms: Final = 600_000
keepalive_ms: Final = 1_000
acknowledgement_silence_ms: Final = 5_000
"""A node that hears no acknowledgement for so long stops its engine: the gateway is gone."""
slow_client_timeout_ms: Final = 60_000
chunk_tick_ms: Final = 5
acceptance_gather_ms: Final = 20
"""A node's `Accepted` waits so long for a first chunk to go along with."""
unstreamed_tick_ms: Final = 1_000
"""A request that is not streamed is sent in larger pieces, at the keep-alive's pace."""
window_bytes: Final = 64 * 1024
chunk_overhead_bytes: Final = 64
"""What a chunk costs beside its text."""
stream_pending_bytes_max: Final = 4 * window_bytes
"""A gateway's memory for one stream: a window and what honest counting may differ by."""
acknowledge_every_chunks: Final = 16
acknowledge_every_ms: Final = 100
attempts_max: Final = 3
template_tokens_margin: Final = 64
"""Tokens a chat template may add to a prompt; a prompt has at most one token a byte besides."""
finished_attempts_kept: Final = 4_096
"""Attempts a node remembers after their end, to answer a repeat alike."""

# Bodies and queues
body_bytes_max: Final = 4 * 1024 * 1024
payload_bytes_max: Final = 8 * 1024 * 1024
bus_subscriptions_max: Final = 64
"""Of one connection; each identity needs three or fewer."""
messages_per_request_max: Final = 4_096
json_depth_max: Final = 32
fields_per_request_max: Final = 256
json_values_max: Final = 65_536
"""Keys, and again brackets, of a body that has fields we do not know."""
harmless_value_bytes_max: Final = 1_024
"""A longer value of a field that is not supported is not looked at: it is not one of the few that
change nothing."""
choices_max: Final = 8
stop_sequences_max: Final = 4
stop_sequence_bytes_max: Final = 256
top_logprobs_max: Final = 20
requests_in_flight_max: Final = 1_024
requests_per_key_in_flight_max: Final = 256
node_queue_max: Final = 256
replay_window: Final = 1_024
senders_kept: Final = 65_536
"""Replay windows and boot ids kept by a receiver."""
bus_waiting_messages_max: Final = 65_536
"""While the server is away; more are refused, and repeated by whoever needs them."""
bus_buffer_bytes_max: Final = 64 * 1024 * 1024
events_page_max: Final = 1_000

# Receipts
receipts_tick_ms: Final = 100
receipt_repeat_first_ms: Final = 1_000
receipt_repeat_last_ms: Final = 30_000
receipts_per_batch_max: Final = 256
countersign_tick_ms: Final = 1_000

# Membership
heartbeat_ms: Final = 5_000
suspect_after_ms: Final = 12_000
dead_after_ms: Final = 20_000
dead_after_closed_ms: Final = 3_000
mass_silence_nodes_min: Final = 3
mass_silence_share_percent: Final = 50
"""Once at least so many nodes and this share of the living fall silent together, evictions freeze:
the fault is more likely ours."""
reconcile_ms: Final = 2_000
replica_digest_ms: Final = 5_000
key_cache_ms: Final = 30_000
"""A revoked key may be served so long by a gateway that missed the notice."""

# Store
group_items_max: Final = 1_024
outbox_tick_ms: Final = 1_000
store_busy_timeout_ms: Final = 5_000
store_cache_kib: Final = 32_768
store_checkpoint_pages: Final = 8_000
"""The write-ahead log grows to so many pages of 4 KiB before it is folded into the database."""

# Coordinator
coordinator_tasks_max: Final = 8_192
"""Messages in hand at once; more are refused as overloaded, or left to be repeated."""
id_letters_max: Final = 128
name_letters_max: Final = 128
note_letters_max: Final = 512
amount_micro_max: Final = 10**15
receipt_bytes_max: Final = 4_096
evidence_per_node_max: Final = 1_000
"""Refused receipts of one node that are kept; more are only counted."""
heartbeat_bytes_max: Final = 256 * 1024
accelerators_max: Final = 64
report_number_max: Final = 2**53
"""Bytes, slots, tokens: beyond this no node says the truth, and JSON no whole numbers."""
answer_bytes_max: Final = 4 * 1024 * 1024
"""A list is cut to what fits into so many bytes."""
rows_counted_max: Final = 10_000
"""Numbers that `status` shows stop here, so that asking for them stays cheap."""
books_tick_ms: Final = 60_000
"""Whether the books balance is looked up so often, whoever asks."""
keys_per_account_max: Final = 64
"""Keys that are valid at once."""
keys_kept_per_account_max: Final = 1_024
"""With those that are revoked or expired; the oldest of these are forgotten first."""
commands_kept_ms: Final = 86_400_000
commands_pruned_per_tick: Final = 1_024
gateway_asked_ms: Final = 60_000
"""A gateway that said nothing for so long is asked to greet."""
gateway_forgotten_ms: Final = 600_000
"""A gateway that said nothing for so long is told nothing more, until it speaks."""
evidence_attempt_max: Final = 2**31
liveness_tick_ms: Final = 1_000
stall_ms_min: Final = 2_000
"""A tick this much too late means that we were not listening: nobody's silence counts for it."""
expiry_tick_ms: Final = 10_000
expiry_first_ms: Final = 60_000
"""After a start, in which nodes repeat what they could not report, before any hold is voided."""
expiry_holds_per_tick: Final = 512
outbox_page: Final = 256
offset_wait_ms: Final = 2_000
offset_poll_ms: Final = 20
"""Doubled from one look to the next."""
offset_ahead_max: Final = 10_000
"""A read that asks for a later offset than this beyond the present is not waited with."""
list_page_max: Final = 1_000
grant_key_bytes: Final = 32
api_key_bytes: Final = 32

# Gateway
infer_repeat_ms: Final = 200
"""An order that was not accepted is said once more: the first may be lost."""
keys_cached_max: Final = 65_536
hold_try_timeout_ms: Final = 500
"""A question for money is repeated so often within `hold_reply_timeout_ms`."""
hold_top_up_pause_ms: Final = 5_000
"""After a refused top-up; what is held is spent in the meantime."""
query_timeout_ms: Final = 2_000
events_wait_ms: Final = 25_000
greet_repeat_ms: Final = 1_000
stop_grace_ms: Final = 30_000
"""How long streams may run on after a gateway was told to stop."""
sse_comment_ms: Final = 10_000
acknowledgement_gather_ms: Final = 5
"""Acknowledgements wait so long for company before they travel alone."""
infer_alone_bytes: Final = 256 * 1024
"""An order this large travels in a message of its own."""
deliveries_per_batch_max: Final = 1_024
batch_bytes_max: Final = 1024 * 1024
"""A message to a node is cut here; only a single order may be larger."""
countersign_repeat_first_ms: Final = 5_000
countersign_repeat_last_ms: Final = 30_000
countersign_repeat_for_ms: Final = 600_000
countersignatures_kept: Final = 65_536
"""What was signed and is not yet known to be stored; the oldest are forgotten first."""
keys_asking_max: Final = 64
"""Unknown keys asked about at once: whoever invents keys must not fill the coordinator."""
request_head_bytes_max: Final = 16 * 1024
request_arrival_ms: Final = 30_000
"""From a request's first byte to its last."""
connections_max: Final = 4_096
connection_look_ms: Final = 1_000
keep_alive_ms: Final = 75_000
linger_ms: Final = 2_000
"""How long a refused body is read and dropped, so that the refusal arrives."""
connections_close_ms: Final = 5_000
"""How long connections may still be written to after the last stream ended."""
native_body_bytes_max: Final = 64 * 1024
events_poll_ms: Final = 500
readiness_kept_ms: Final = 1_000
idempotency_key_letters_max: Final = 255
key_life_s_max: Final = 10 * 365 * 86_400
offset_max: Final = 2**53
"""Whole numbers above it are not exact in JavaScript."""
plausible_context_tokens_max: Final = 2**24
plausible_slots_max: Final = 2**16
plausible_price_micro_max: Final = 10**12
"""Whatever a replica table says beyond these is a fault, and is not routed to."""

# Agent
sandbox_tmp_bytes: Final = 64 * 1024 * 1024
sandbox_pids_max: Final = 128
sandbox_file_bytes: Final = 64 * 1024 * 1024
sandbox_proof_timeout_ms: Final = 10_000
engine_memory_min_bytes: Final = 512 * 1024 * 1024
"""Below this an engine cannot even start, whatever its model's manifest says."""
engine_start_timeout_ms: Final = 120_000
engine_stop_grace_ms: Final = 2_000
engine_line_bytes_max: Final = 1024 * 1024
engine_connections_kept: Final = 64
model_retry_first_ms: Final = 1_000
model_retry_last_ms: Final = 60_000
model_download_timeout_ms: Final = 3_600_000
deployments_per_node_max: Final = 32
unload_drain_ms: Final = 30_000
"""How long requests in flight may go on in an engine that is to be stopped."""
attempts_watch_ms: Final = 100
attempt_repeat_ms: Final = 1_000
"""An attempt's end, and its first unacknowledged chunk, are said again so often."""
attempt_buffer_bytes: Final = 16 * 1024
"""Tokens gathered for one chunk at most."""
agent_drain_ms: Final = 1_000
"""How long an agent that ends waits for acknowledgements, of chunks and again of receipts."""
hello_timeout_ms: Final = 2_000
hello_pause_first_ms: Final = 1_000
hello_pause_last_ms: Final = 30_000
journal_compact_bytes: Final = 4 * 1024 * 1024
receipts_refused_kept: Final = 1_000

# Processes on one machine
open_files_wanted: Final = 16_384
child_grace_ms: Final = 5_000
"""How long a process may take to end when asked, before it is killed."""
child_streams_grace_ms: Final = 2_000
"""How long streams may run on when a whole pool is told to end; its owner is waiting."""
node_grace_ms: Final = 8_000
"""As `child_grace_ms`: a node waits for acknowledgements, and then for its engines."""
cgroup_removal_ms: Final = 2_000
process_end_wait_ms: Final = 1_000
"""How long the descendants of an ended process may take to be gone."""
"""How long a control group may take to become empty once all in it were killed."""
child_log_bytes_max: Final = 16 * 1024 * 1024
"""Of each log; one older one of this size is kept besides."""
child_log_check_ms: Final = 10_000
child_settled_ms: Final = 30_000
"""A child that lived so long is not failing, whatever ends it."""
child_back_off_first_ms: Final = 200
child_back_off_last_ms: Final = 10_000
child_failures_max: Final = 6
"""So many quick ends in a row, and `up` gives up before it has ever served."""
