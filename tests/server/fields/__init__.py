"""One row per field of the contract, by theme; `test_openai_fields` runs them and checks that none is missing."""
