"""Why a prompt missed, told from what was stored; and what the journal forgets."""

import pytest

from kvpool.journal import MAX_SHARED, Miss, MissReason, PrefixJournal, PromptChain
from kvpool.prefix import PrefixBlock, extend_chain, namespace_root

SIZE = 4
MODEL, OTHER_MODEL = namespace_root("model"), namespace_root("other")
ROOT, SALTED, FOREIGN = namespace_root("model", ""), namespace_root("model", "salt"), namespace_root("other", "")


class Clock:
    def __init__(self) -> None:
        self.now_s = 100.0

    def now(self) -> float:
        return self.now_s


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def journal(clock: Clock) -> PrefixJournal:
    return PrefixJournal(clock.now, max_blocks=100)


def chain(token_ids: list[int], root: bytes = ROOT, scope: bytes = MODEL) -> PromptChain:
    digests: list[bytes] = []
    extend_chain(root, digests, token_ids, SIZE)
    return PromptChain(root, scope, digests, token_ids)


def store(journal: PrefixJournal, prompt: PromptChain) -> None:
    for index, digest in enumerate(prompt.digests):
        parent = prompt.digests[index - 1] if index else None
        tokens = tuple(prompt.token_ids[index * SIZE : (index + 1) * SIZE])
        journal.on_stored(PrefixBlock(digest, parent, tokens, prompt.root, prompt.scope))


def test_a_prompt_found_whole_missed_nothing(journal: PrefixJournal) -> None:
    store(journal, chain([1, 2, 3, 4, 5, 6, 7, 8]))
    assert journal.explain(chain([1, 2, 3, 4, 5, 6, 7, 8, 9]), 2, SIZE) is None


def test_too_short_for_a_block(journal: PrefixJournal) -> None:
    assert journal.explain(chain([1, 2, 3]), 0, SIZE) == Miss(MissReason.TOO_SHORT, 0)


def test_what_was_known_did_not_fill_the_next_block(journal: PrefixJournal) -> None:
    store(journal, chain([1, 2, 3, 4, 5, 6]))
    longer = chain([1, 2, 3, 4, 5, 6, 7, 8])
    assert journal.explain(longer, 1, SIZE) == Miss(MissReason.TOO_SHORT, 4)
    store(journal, longer)
    assert journal.explain(chain([1, 2, 3, 4, 5, 6, 7, 9]), 1, SIZE) == Miss(MissReason.NEVER_SEEN, 7)


@pytest.mark.parametrize("position", range(12))
def test_the_first_token_that_differs(journal: PrefixJournal, position: int) -> None:
    known = list(range(12))
    store(journal, chain(known))
    asked = [*known[:position], 99, *known[position + 1 :]]
    assert journal.explain(chain(asked), position // SIZE, SIZE) == Miss(MissReason.NEVER_SEEN, position)


def test_of_several_known_continuations_the_nearest_counts(journal: PrefixJournal) -> None:
    for last in ([5, 0, 0, 0], [5, 6, 7, 0], [5, 6, 0, 0]):
        store(journal, chain([1, 2, 3, 4, *last]))
    assert journal.explain(chain([1, 2, 3, 4, 5, 6, 7, 8]), 1, SIZE) == Miss(MissReason.NEVER_SEEN, 7)


def test_a_block_that_had_to_make_room(journal: PrefixJournal) -> None:
    store(journal, chain(list(range(12))))
    assert journal.explain(chain(list(range(12))), 1, SIZE) == Miss(MissReason.EVICTED, 4)


def test_another_salt_and_another_adapter(journal: PrefixJournal) -> None:
    store(journal, chain([1, 2, 3, 4], SALTED, MODEL))
    assert journal.explain(chain([1, 2, 3, 4]), 0, SIZE) == Miss(MissReason.SALT, 0)
    assert journal.explain(chain([1, 2, 3, 4], FOREIGN, OTHER_MODEL), 0, SIZE) == Miss(MissReason.ADAPTER, 0)
    store(journal, chain([1, 2, 3, 4], FOREIGN, OTHER_MODEL))
    assert journal.explain(chain([1, 2, 3, 4]), 0, SIZE) == Miss(MissReason.SALT, 0)  # the nearer reason
    assert journal.explain(chain([1, 2, 3, 5]), 0, SIZE) == Miss(MissReason.NEVER_SEEN, 0)


def test_other_namespaces_are_not_compared_token_by_token(journal: PrefixJournal) -> None:
    store(journal, chain([1, 2, 3, 4], SALTED, MODEL))
    assert journal.explain(chain([1, 2, 3, 9]), 0, SIZE) == Miss(MissReason.NEVER_SEEN, 0)


def test_what_was_stored_longest_ago_is_forgotten(clock: Clock) -> None:
    journal = PrefixJournal(clock.now, max_blocks=3)
    first, second = chain([1, 2, 3, 4, 5, 6, 7, 8]), chain([9, 9, 9, 9, 8, 8, 8, 8])
    store(journal, first)
    store(journal, second)
    assert len(journal) == 3
    assert journal.explain(first, 0, SIZE) == Miss(MissReason.NEVER_SEEN, 0)
    assert journal.explain(first, 1, SIZE) == Miss(MissReason.EVICTED, 4)
    store(journal, chain([1, 2, 3, 4], SALTED))
    assert journal.explain(first, 0, SIZE) == Miss(MissReason.SALT, 0)
    for number in range(10):
        store(journal, chain([number] * 4))
    assert len(journal) == 3
    assert journal.explain(first, 0, SIZE) == Miss(MissReason.NEVER_SEEN, 0)


def test_a_block_stored_again_is_new(clock: Clock) -> None:
    journal = PrefixJournal(clock.now, max_blocks=2)
    store(journal, chain([1] * 4))
    store(journal, chain([2] * 4))
    clock.now_s += 5
    store(journal, chain([1] * 4))
    store(journal, chain([3] * 4))
    assert journal.explain(chain([1] * 4), 0, SIZE) == Miss(MissReason.EVICTED, 0)
    assert journal.explain(chain([2] * 4), 0, SIZE) == Miss(MissReason.NEVER_SEEN, 0)


def test_ages_of_those_that_are_still_there(clock: Clock, journal: PrefixJournal) -> None:
    prompt = chain(list(range(12)))
    store(journal, PromptChain(ROOT, MODEL, prompt.digests[:2], prompt.token_ids))
    clock.now_s += 10
    store(journal, chain([7] * 4))
    clock.now_s += 1
    assert journal.ages_s(lambda digest: True) == [11, 11, 1]
    assert journal.ages_s(lambda digest: digest != prompt.digests[0]) == [11, 1]


def test_the_prefixes_that_saved_most(journal: PrefixJournal) -> None:
    short, long = chain([1] * 4), chain(list(range(40)))
    for _ in range(5):
        journal.found(short, 1)
    journal.found(long, 10)
    journal.found(long, 0)
    top = journal.most_shared(5)
    assert [(p.digest, p.num_blocks, p.num_hits) for p in top] == [(long.digests[9], 10, 1), (short.digests[0], 1, 5)]
    assert journal.most_shared(1) == top[:1]


def test_the_number_of_prefixes_counted_is_bounded(journal: PrefixJournal) -> None:
    for number in range(MAX_SHARED + 10):
        journal.found(chain([number] * 4), 1)
    assert len(journal.most_shared(10 * MAX_SHARED)) == MAX_SHARED
