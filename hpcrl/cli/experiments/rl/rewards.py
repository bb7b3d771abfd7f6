"""The reward of the experiment, which experiment.toml names in environment.reward_function."""


def score(response, _environment):
    """Return the share of letters in their places, from 0 to 1.

    `response` has the text, the row's ground_truth, the prompt's messages and, in extras, the row's other columns.
    """
    answer, right = response.text, response.ground_truth
    in_place = sum(a == b for a, b in zip(answer, right, strict=False))
    return in_place / max(len(answer), len(right))
