"""Prompt look-up against a search in plain Python."""

import random

from engine.scheduling.request import Request
from engine.spec.ngram import MAX_MATCH, MIN_MATCH, NgramProposer
from engine.types import SamplingParams


def request(prompt, prediction=(), request_id=1):
    return Request(request_id, 1, list(prompt), len(prompt), SamplingParams(), 1000, b"", prediction=tuple(prediction))


def longest_match(text, most):
    """What followed the longest earlier occurrence of the end of `text`, the latest of several, by trying them all."""
    best, at = 0, None
    for end in range(1, len(text)):
        length = 0
        while length < min(end, MAX_MATCH) and text[end - 1 - length] == text[-1 - length]:
            length += 1
        if length >= max(best, MIN_MATCH):
            best, at = length, end
    if at is None:
        return []
    drafts = []
    while len(drafts) < most:  # what is drafted is part of the text that repeats
        drafts.append((text + drafts)[at + len(drafts)])
    return drafts


def test_it_finds_what_a_plain_search_finds_as_the_answer_grows():
    dice = random.Random(1)
    for number in range(200):
        letters = dice.choice([2, 3, 8])
        one, proposer = request([dice.randrange(letters) for _ in range(dice.randint(1, 12))]), NgramProposer()
        for _ in range(40):
            most = dice.randint(1, 6)
            want = longest_match(one.token_ids, most)
            assert proposer.offers([one], most) == [len(want)], number
            assert proposer.propose({one: most}) == ({one: want} if want else {})
            one.token_ids += [dice.randrange(letters) for _ in range(dice.randint(1, 3))]


def test_a_quote_goes_on_as_in_the_prompt_and_a_loop_in_its_period():
    assert NgramProposer().propose({(r := request([1, 2, 3, 4, 5, 9, 2, 3])): 4}) == {r: [4, 5, 9, 2]}
    assert NgramProposer().propose({(r := request([7, 8, 9, 8, 9, 8, 9])): 5}) == {r: [8, 9, 8, 9, 8]}
    short = [[1, 2, 3], [5], [5, 5], [1, 2, 3, 2]]
    assert NgramProposer().propose({request(p, request_id=i): 4 for i, p in enumerate(short)}) == {}


def test_a_prediction_is_followed_from_the_first_token_and_found_again_after_a_difference():
    prediction = [50, 51, 52, 53, 54, 55, 56]
    one, proposer = request(range(20), prediction), NgramProposer()
    assert proposer.propose({one: 3}) == {one: [50, 51, 52]}
    one.token_ids += [50, 51, 99]
    assert proposer.propose({one: 3}) == {}
    one.token_ids += [53, 54]
    assert proposer.propose({one: 8}) == {one: [55, 56]}, "nothing is drafted beyond its end"
    one.token_ids += [55, 56]
    assert proposer.propose({one: 8}) == {}


def test_requests_do_not_see_each_other_and_are_forgotten():
    first, second, proposer = request([1, 2, 3, 1, 2]), request([1, 2], request_id=2), NgramProposer()
    assert proposer.offers([first, second], 2) == [2, 0]
    proposer.forget(first)
    proposer.forget(first)
    again = request([4, 4, 4], request_id=1)
    assert proposer.propose({again: 2}) == {again: [4, 4]}
    assert set(proposer._texts) == {1, 2}
