"""The wire: what a body may hold and what an answer holds, as pydantic models. Knows JSON; decides nothing."""
