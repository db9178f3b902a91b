//! Translates the entrypoint of a file in Determined's format.

use serde_json::{Value, json};

use super::Translation;

const FROM: &str = "entrypoint";
const TO: &str = "spec.entrypoint.command";
/// Prefix of the Python modules that start the ranks in Determined.
const LAUNCHER_PREFIX: &str = "determined.launch.";
/// Characters that have a meaning in a shell.
const SHELL_CHARS: &str = "|&;<>()$`\\\"'*?[]#~=%{}!\n";

/// Program behind one of Determined's launchers.
#[derive(Debug, PartialEq)]
enum Launched<'a> {
    /// Name of the launcher, and words of the program.
    Program(&'a str, &'a [&'a str]),
    /// The launcher loads a Python class, or its program was not found.
    Class,
}

pub(super) fn translate(translation: &mut Translation<'_>) {
    let Some(value) = translation.take(FROM) else { return };
    let words: Option<Vec<&str>> = match value {
        Value::String(text) => Some(text.split_whitespace().collect()),
        Value::Array(words) => words.iter().map(Value::as_str).collect(),
        _ => None,
    };
    match words.as_deref().and_then(behind_launcher) {
        Some(Launched::Program(launcher, program)) => {
            return set_program(translation, value, launcher, program);
        }
        Some(Launched::Class) => return refuse(translation, value, CLASS_RULE),
        None => {}
    }
    match value {
        Value::String(text) if is_class(text) => refuse(translation, value, CLASS_RULE),
        Value::String(text) if text.contains(LAUNCHER_PREFIX) => {
            let rule = "starts a launcher of Determined, but Stoker starts the ranks itself; set \
                        the program that the launcher starts";
            refuse(translation, value, rule);
        }
        Value::String(text) => {
            translation.set(TO, json!(["sh", "-c", text]), FROM);
            translation
                .notes
                .push(r#"entrypoint -> spec.entrypoint.command: ["sh", "-c", TEXT]"#.to_owned());
        }
        other => {
            translation.set(TO, other.clone(), FROM);
            translation.note(FROM, TO);
        }
    }
}

const CLASS_RULE: &str = "is a Python class, which Stoker cannot train; set a program to run";

fn refuse(translation: &mut Translation<'_>, value: &Value, rule: &str) {
    translation.refuse(FROM, value, rule);
    let words = if value.is_array() { value.clone() } else { json!([value]) };
    translation.set(TO, words, FROM);
}

/// Sets the program of a launcher: its words, or a shell for a text that needs one.
fn set_program(translation: &mut Translation<'_>, value: &Value, launcher: &str, program: &[&str]) {
    let needs_shell =
        value.is_string() && program.iter().any(|word| word.contains(|c| SHELL_CHARS.contains(c)));
    let command = match (needs_shell, value) {
        // Take the text itself, whose spaces may be quoted.
        (true, Value::String(text)) => json!(["sh", "-c", words_from(text, program.len())]),
        _ => json!(program),
    };
    let note = format!("{FROM} -> {TO}: {command}, without {launcher}: Stoker starts the ranks");
    translation.notes.push(note);
    translation.set(TO, command, FROM);
}

/// Returns the last words of a text, with the spaces between them.
fn words_from(text: &str, num_words: usize) -> &str {
    let skipped = text.split_whitespace().count() - num_words;
    let next = text.split_whitespace().nth(skipped);
    let start = next.map_or(text.len(), |word| word.as_ptr().addr() - text.as_ptr().addr());
    text[start..].trim_end()
}

/// Returns what `python3 -m determined.launch.NAME [OPTIONS] [--] PROGRAM` starts; `None` for other
/// commands.
fn behind_launcher<'a>(words: &'a [&'a str]) -> Option<Launched<'a>> {
    let [python, "-m", launcher, rest @ ..] = words else { return None };
    let is_python = python.rsplit('/').next().is_some_and(|name| name.starts_with("python"));
    if !is_python || !launcher.starts_with(LAUNCHER_PREFIX) {
        return None;
    }
    let mut rest = rest;
    while let [option, after @ ..] = rest
        && option.starts_with('-')
    {
        rest = match after.iter().position(|word| *word == "--") {
            _ if *option == "--" => after,
            Some(end) => &after[end..],
            None if *option == "--trial" || option.starts_with("--trial=") => &[],
            None => after,
        };
    }
    Some(match rest {
        [] => Launched::Class,
        [class] if is_class(class) => Launched::Class,
        program => Launched::Program(launcher, program),
    })
}

/// Returns `true` for `module.of.python:Class`.
fn is_class(text: &str) -> bool {
    let is_name = |text: &str| {
        !text.is_empty()
            && text.bytes().all(|b| b.is_ascii_alphanumeric() || b == b'_' || b == b'.')
    };
    text.split_once(':').is_some_and(|(module, class)| is_name(module) && is_name(class))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn programs_behind_launchers_are_found() {
        let check = |options: &str, expected: Option<&str>| {
            let text = format!("python3 -m determined.launch.horovod {options}");
            let words: Vec<&str> = text.split_whitespace().collect();
            let program = match behind_launcher(&words) {
                Some(Launched::Program("determined.launch.horovod", program)) => {
                    Some(program.join(" "))
                }
                Some(Launched::Class) => None,
                other => panic!("{text}: {other:?}"),
            };
            assert_eq!(program.as_deref(), expected, "{text}");
        };
        check("python3 train.py --epochs 2", Some("python3 train.py --epochs 2"));
        check("-- train --a", Some("train --a"));
        check("--cycle-time 5 -x -- train -- --a", Some("train -- --a"));
        check("--autohorovod train", Some("train"));
        check("--autohorovod --trial model_def:MyTrial", None);
        check("--fusion 3 -- --trial model_def:MyTrial", None);
        check("--trial=model_def:MyTrial", None);
        check("model_def:MyTrial", None);
        check("", None);
        let others: [&[&str]; 3] = [
            &["python3", "train.py"],
            &["python3", "-m", "train"],
            &["train", "-m", "determined.launch.horovod"],
        ];
        for words in others {
            assert_eq!(behind_launcher(words), None, "{words:?}");
        }
    }

    #[test]
    fn text_of_last_words_keeps_its_spaces() {
        assert_eq!(words_from("a  -- b 'c  d' ", 3), "b 'c  d'");
        assert_eq!(words_from("a b", 0), "");
    }
}
