"""The environments that come with the project, by the names that `--env` takes.

guess.py           a number, found by halving a range
wordle.py          a word of five letters in six guesses
reverse_text.py    a short text, letter by letter
alphabet_sort.py   names in order, over several turns
reasoning_gym.py   any family of the package reasoning-gym, with the family's own scorer
math.py            problems with a formula as answer, compared by math-verify
humaneval.py       the 164 problems of HumanEval, for evaluation alone
search.py          questions over documents, with a real index

tagged_text.py, words.py and corpus.py hold what several of them read.
"""
