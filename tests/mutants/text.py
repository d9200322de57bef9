"""Faults where a document is one record of many targets, and where a public part stays as it is."""

from __future__ import annotations

from mutants.fault import Fault, group

FAULTS: list[Fault] = [
    *group(
        "dpdist/gradients/engine.py", "models/test_next_word",
        ("losses.sum(1) / (targets >= 0).sum(1).clamp(min=1)", "losses.sum(1)",
         "a document's gradient is a sum over its words"),
        ("losses.sum(1) / (targets >= 0).sum(1).clamp(min=1)",
         "losses.sum(1) / (targets >= 0).sum().clamp(min=1)",
         "a document's gradient depends on how many words others have"),
        ("reduction=\"none\", ignore_index=PADDING", "reduction=\"none\", ignore_index=0",
         "what is behind the end is learned, and a real word is not"),
    ),
    *group(
        "dpdist/data/text.py", "data/test_next_token",
        ("if document.word_hash not in known]", "if document.word_hash]",
         "a public text is a private record too"),
        ("vocabulary = _vocabulary(public)", "vocabulary = _vocabulary(public + train)",
         "the vocabulary is made of private documents"),
        ("documents[key] = min(text, documents.get(key, text))",
         "documents[key + text.encode()] = text", "a document is there as often as it is written"),
    ),
    *group(
        "dpdist/data/text.py", "data/test_next_token",
        ("split_words(text)[: length - 2]", "split_words(text)[:length]",
         "documents of words are longer than they may be"),
        ("tokens = f\"words {self.words.digest}\"", "tokens = \"words\"",
         "rows of another list of words are taken for these"),
        ("    after[:, :-1] = np.maximum(rows[:, 1:], PADDING)", "    after[:, :] = rows",
         "what is to be said is what was read"),
    ),
    *group(
        "dpdist/data/text.py", "test_text_answers",
        ("    before = [] if begin is None or begun else [begin]",
         "    before = [] if begin is None else [begin]",
         "a document begins twice where the tokenizer begins it by itself"),
        ("encoded.special_tokens_mask, self._marks)[: self.length]",
         "encoded.special_tokens_mask, self._marks)[: self.length - 1] + [self._marks[1]]",
         "a document that is cut has an end"),
        ('            about.append(f"marks {self._marks}")', "            pass",
         "documents with a begin and an end are taken for those without"),
    ),
    *group(
        "dpdist/training/pretraining.py", "models/test_next_word",
        ("if found.text_encoding != data.load(source, \"test\").text_encoding:", "if False:",
         "public weights mean other tokens"),
    ),
    *group(
        "dpdist/training/model_setup.py", "training/test_initial_weights",
        ("    module.requires_grad_(False)\n", "", "the public part is trained"),
        ("        _train_only(module, recipe.model.trained, spec)", "        pass",
         "everything is trained, whatever the recipe says"),
    ),
    *group(
        "dpdist/models/zoo.py", "models/test_next_word",
        ("nn.functional.pad(x, (0, 0, self.count - 1, 0))",
         "nn.functional.pad(x, (0, 0, 0, self.count - 1))", "the next words are read before they are said"),
    ),
    *group(
        "dpdist/config/sections.py", "models/test_transformer",
        ('"model.shifts": self.model.shifts > 0', '"model.shifts": False',
         "a model of texts is shifted by pixels"),
        ('"model.mirrored": self.model.mirrored', '"model.mirrored": False',
         "a model of texts is mirrored"),
    ),
]  # fmt: skip
