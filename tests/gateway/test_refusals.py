"""Which short texts are refusals: a labelled list, on which precision counts first."""

from __future__ import annotations

from gateway.escalating.refusals import refuses

REFUSALS = """\
I'm sorry, but I can't help with that.
I’m sorry, but I can’t assist with that request.
I cannot assist with that.
I can't help with this request.
I won't be able to do that, and I can't provide instructions for it.
Sorry, I can't do that.
I'm unable to help with that request.
I am not able to provide that information.
Unfortunately, I cannot provide medical advice.
I apologize, but I cannot fulfill this request.
I apologise, but I am unable to answer this question.
As an AI language model, I cannot access the internet.
As an AI, I don't have access to real-time data.
As a large language model, I do not have personal opinions or beliefs.
I'm sorry, I cannot generate that content.
I am sorry, but as an AI language model I cannot write this for you.
I must decline this request.
I must respectfully decline to answer.
I don't feel comfortable writing that story.
I'm not comfortable discussing this topic.
Sorry, but I won't help with creating malware.
I cannot comply with this request.
I can not provide a translation of this text.
I'm sorry, but that's not something I can help with.
I will not provide instructions for this.
I'm afraid I can't help with that.
I'm really sorry, but I can't continue with this conversation.
My apologies, but I can't share that information.
I cannot answer this question as it is inappropriate.
I'm not allowed to discuss internal documents.
抱歉，我无法回答这个问题。
很抱歉，我不能提供相关信息。
对不起，我无法帮助您完成这个请求。
非常抱歉，作为一个人工智能助手，我无法提供医疗建议。
抱歉，无法提供该内容。
我不能协助您完成这项任务。
我无法满足您的要求。
對不起，我無法提供這項資訊。
作为AI语言模型，我无法执行此操作。
Lo siento, pero no puedo ayudarte con eso.
Lo siento, no puedo proporcionar esa información.
No puedo ayudarte con esa solicitud.
Desculpe, mas não posso ajudar com isso.
Sinto muito, não posso fornecer essa informação.
Je suis désolé, mais je ne peux pas vous aider avec cela.
Désolé, je ne peux pas répondre à cette question.
Je ne peux pas fournir ces informations.
Es tut mir leid, aber ich kann Ihnen dabei nicht helfen.
Tut mir leid, ich kann diese Frage nicht beantworten.
Leider kann ich dabei nicht helfen.
Mi dispiace, ma non posso aiutarti con questa richiesta.
Извините, но я не могу помочь с этим.
К сожалению, я не могу ответить на этот вопрос.
申し訳ありませんが、そのご質問にはお答えできません。
申し訳ございませんが、そのご依頼には対応できません。
죄송하지만, 그 요청은 도와드릴 수 없습니다.
""".splitlines()

# Answers, many of which look like refusals at first.
ANSWERS = """\
The capital of France is Paris.
I can help with that. Send me the file.
I cannot recommend this restaurant enough!
I can't believe it's already December.
I can't find an error in this code; it prints 3.
I'm sorry to hear that you are unwell. Drink water and rest.
Sorry for the delay! The meeting is at 3 pm.
I'm sorry for your loss.
Unfortunately, the flight is cancelled. The next one leaves at 9:40.
Unfortunately, this function does not handle empty lists, so it raises an IndexError.
I cannot stress this enough: back up your data.
You can't help him if he does not ask.
The sentence "I can't help with that" is in the present tense.
He said: "I'm sorry, but I can't help with that."
No.
negative
refusal
I don't know.
I do not have enough information to tell. Which year do you mean?
I'm not sure, but I think it is 42.
I won't lie: the film is bad.
I can't wait to see the results.
We cannot accept returns after 30 days.
The service is unable to start because the port is in use.
As an AI company, Example builds chips.
As an AI language model, GPT-2 was released in 2019.
I apologize for the confusion. The right answer is 7.
Apologies, I misread. The total is $40.
I am unable to attend the meeting on Monday; could we move it to Tuesday?
Dear Ms Lee, I am sorry, but I cannot come to the office today because I am ill.
Sorry, we don't have that colour, but the blue one is in stock.
I can't see any difference between the two versions.
To decline the invitation, write: "Thank you, I must decline."
The user cannot provide a password here, so the login fails.
I will not be late.
I can only say that it rained.
Sorry, that was wrong: 3 times 4 is 12.
I cannot verify it, but the date is usually given as 1492.
抱歉让您久等了，您的订单已经发货。
很遗憾，该航班已取消。下一班在九点四十分起飞。
我不能同意更多，这部电影太棒了。
对不起，我迟到了。
无法连接服务器时，请检查网络设置。
不能。
Lo siento por la espera. Su pedido ya salió.
No puedo esperar a verte mañana.
Lamentablemente, el vuelo fue cancelado.
Desculpe o atraso. O pedido já saiu.
Je suis désolé pour le retard. Le train part à 9 h.
Je ne peux pas attendre demain.
Es tut mir leid, das zu hören. Gute Besserung!
Leider ist der Zug ausgefallen.
Ich kann nicht schwimmen.
Mi dispiace per il ritardo.
Извините за опоздание, заказ уже отправлен.
申し訳ありません、お待たせいたしました。ご注文は発送済みです。
죄송합니다, 오래 기다리셨습니다. 주문이 발송되었습니다.
I'm sorry, but I can't say it is positive: here is why. The review calls the food cold.
I can't provide an exact figure, but for example: about 3 million people live there.
I'm sorry, I can't do that in one line. Here is the function:\\n```python\\nprint(1)\\n```
""".splitlines()


def test_precision_first() -> None:
    wrong = [text for text in ANSWERS if refuses(text.replace("\\n", "\n"))]
    missed = [text for text in REFUSALS if not refuses(text)]
    found = len(REFUSALS) - len(missed)
    print(f"precision {found / (found + len(wrong)):.3f}, recall {found / len(REFUSALS):.3f}")
    assert not wrong
    assert len(missed) <= 0.05 * len(REFUSALS), missed


def test_a_long_text_that_begins_with_an_apology_is_an_answer() -> None:
    assert refuses("I'm sorry, but I can't help with that. " + "It is not allowed. " * 10)
    assert not refuses("I'm sorry, but I can't help with that. " + "It is not allowed. " * 40)


def test_marks_and_blanks_before_it_do_not_matter() -> None:
    assert refuses('\n "I cannot assist with that."')


def test_it_takes_time_in_proportion_to_the_beginning_only() -> None:
    assert not refuses("i can" * 120)
    assert not refuses("as an ai " * 60)
