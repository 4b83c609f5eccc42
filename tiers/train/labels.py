"""Tasks of public instruction prompts, labelled by hand for Tierline: one letter per prompt, in the file's order.

A dot leaves the prompt out: two readers could disagree. The prompts themselves are not part of the project.
"""

from __future__ import annotations

from typing import Final

LETTERS: Final = {
    "c": "label_text",
    "e": "extract_fields",
    "s": "summarise_text",
    "w": "rewrite_text",
    "t": "translate_text",
    "q": "recall_fact",
    "x": "exam_question",
    "g": "graduate_question",
    "k": "explain_topic",
    "h": "small_talk",
    "p": "write_text",
    "b": "list_ideas",
    "f": "write_function",
    "d": "software_work",
    "m": "word_problem",
    "n": "competition_math",
    "z": "logic_puzzle",
    "r": "analyse_situation",
}

# self_instruct_seed_tasks_175.jsonl, ten prompts to the group
SEED_TASKS: Final = (
    "b.ppppbkpb bbkep.rbpk p.mkbnehdp bdkbhnbdbe bdwwbm.pqp dwkekp.pmp kdspsb.ehf .kf.p.b.wp bbkmpeppqp"
    " bb.p.kpwwk ptkkkp.b.m mkp..qbtkp qb.pp.wb.p .b.bqemsdf dfk.n..qcc ccc.c.cc.c .xc..ccccc .cccc"
)
# self_instruct_user_oriented_252.jsonl
USER_ORIENTED: Final = (
    "wcw.bpwppp b.df...kbm .b..ppb.ep b.p.bb..dd ..kbb.bb.p bbp.pppppp pppb.pb... .kppppbkd. .......bbd"
    " .c.fb.d.sw t...bbb... bbbk.k.bbb .b....k.b. bk..z.b.b. nnn.n....m .b....wecs swecccc.b. ..b....b.e"
    " .s.cc.pw.w d.bwcd.cbs .....dppb. dpe.bb..pp wb.p.c.db. pdcbccw.ck wbd.ckwe.b .k"
)
# arena_hard_v0.1_500.jsonl
ARENA_HARD: Final = (
    ".fkrddrrdd ddgn..zndd fdddddr.ff ddrkddffd. drddrpk.dd .cddpdd..d .drmdddkpp dddddddd.g ddd.dddd.d"
    " ddrpddd..d dd.kndddrk ddrkd.dd.k .d..dwnd.. m..dbz..dd .ddddrggdd b.mde..k.d dddd.pd.dd bfdkffdddd"
    " d.dbdpbpdk ddrkddddbk .kp.dd.prr ddmmrrdd.. dddd.dedk. ddddddk... gfdddd.pdd d.dd..dk.t bddd..b.ff"
    " rrrd.bpddd k.zzdkddd. fdddddddzf .kddmkd..r dddd.d.ddr ddbpdd..k. .rff.gp..p ..ddnndddd ddddddddd."
    " fdddddd.dd ddp.dddkdd nndpsdd.dd kzdfddddp. dddd.ddndd pdrprdd.dd dfz.fdzmkc kdddfddddf d.df.ncddd"
    " rr.rddh.dr ddbmdd..dm d..pdddddd gkdddpddkd dd..ddddfd"
)
# vicuna_bench_80.jsonl, by its own categories
VICUNA: Final = {
    "generic": "k",
    "knowledge": "k",
    "common-sense": "k",
    "fermi": "r",
    "counterfactual": "r",
    "writing": "p",
    "coding": "f",
    "math": "n",
}


def kinds(letters: str, count: int) -> list[str | None]:
    """The kind of each of `count` prompts, None where it was left out.

    Raises:
        ValueError: the labels do not fit the file.
    """
    flat = letters.replace(" ", "")
    if len(flat) != count:
        raise ValueError(f"{len(flat)} labels for {count} prompts: this is another version of the file")
    return [LETTERS.get(letter) for letter in flat]
