"""The embedded model, forced to spell letter by letter: its next turn still begins with exactly what it wrote."""

from server.llm import LLM

BLOCK_SIZE = 16


def test_a_reply_in_single_letters_is_found_whole() -> None:
    with LLM(progress=False, max_model_len=512, kv_cache_memory=64 << 20, max_num_seqs=2) as llm:
        letters = [llm.tokenizer.token_id(letter) for letter in "the"]
        question = {"role": "user", "content": "Say anything."}
        [first] = llm.chat(
            [question], temperature=0, max_tokens=40, allowed_token_ids=letters, ignore_eos=True, return_token_ids=True
        )
        prompt_ids, written = first.body["prompt_token_ids"], first.body["choices"][0]["token_ids"]
        assert len(written) == 40
        assert llm.tokenizer.encode(first.text, add_special_tokens=False) != written  # no canonical spelling
        messages = [question, {"role": "assistant", "content": first.text}, {"role": "user", "content": "And now?"}]
        [second] = llm.chat(messages, temperature=0, max_tokens=1, return_token_ids=True)
        assert second.body["prompt_token_ids"][: len(prompt_ids) + 40] == [*prompt_ids, *written]
        whole_turn = (len(prompt_ids) + 40 - 1) // BLOCK_SIZE * BLOCK_SIZE
        assert second.usage["prompt_tokens_details"]["cached_tokens"] == whole_turn
