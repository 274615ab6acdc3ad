"""Everything between text and token ids: templates, tokenizing, detokenizing, stops, reasoning, tools, grammars."""
