"""Decides what each step computes, and applies the results. No torch: it handles tokens, pages and counts.

Read first: scheduler.py (the only loop), request.py (`Req`), planner.py, commit.py.

- State: state.py, batch.py (`ScheduleBatch`), groups.py (samples of one prompt), kv_manager.py (pages, leases, rows),
  kv_part.py (of which there may be several)
- Who runs next: waiting.py (lanes of keys and priorities), policy.py, fairness.py (turns of keys), admission.py (how
  much memory a request will need), part_choice.py (where its KV goes), preemption.py, retract.py (back to the
  queue), grammar_queue.py (those whose grammar is being compiled)
- How much a step computes: prompt_budget.py (tokens of prompts), step_cost.py (how long steps take)
- Images: encodings.py (which of them are encoded, and who waits for them)
- Operations: control.py, lora.py (loads beside the steps), weights.py (pause, updates), drain.py (requests that an
  update waits for)
- Tests: faults.py (injected ones)
"""
