"""Text and token ids: tokenizers, chat templates, the detokenizer, incremental decoding and stop matching.

Read first: detokenizer_manager.py (the detokenizer process), incremental.py (ids -> text), chat_templates.py.

- In: tokenizers/, batch_tokenizer.py (beside the event loop), template_sandbox.py (and marks on what users wrote), template_child.py
  (renders what nobody has read), fill_in_middle.py
- Stops: stop.py
"""
