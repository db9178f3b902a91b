//! Counts phrases that docs/language.md replaces by plain ones, in all texts of the repository.

use stoker_tests::{files, repository};

/// Phrases with few uses in technical English. A space stands for any boundary of a word.
const PHRASES: &[&str] = &[
    " nobody ",
    " somebody ",
    " whoever ",
    " one that ",
    " those that ",
    " goes on ",
    " gone on ",
    " anew ",
    " is told ",
    " are told ",
    " asked to leave ",
    " to the bit ",
    " under the program ",
    " for people ",
    " stands still ",
    " sign of life ",
    " of no use ",
    " of its own ",
    " of one's own ",
    " by hand ",
    " now and then ",
    " but for ",
    " finds no ",
    " gives back ",
    " lies in ",
];

/// First words of comments that hide the subject.
const OPENINGS: &[&str] = &["What ", "Who ", "Whoever ", "Whatever "];

/// Phrases allowed in 1,000 lines. Some uses are right.
const PER_THOUSAND_MAX: f64 = 0.5;

/// Files that are not counted: the guide itself, and these lists.
const EXEMPT: &[&str] = &["docs/language.md", "tests/tests/language.rs"];

/// Parts that are about to be rewritten.
const LATER: &[&str] = &[
    "engine/src/search",
    "engine/src/experiment",
    "cli/src/run/state.rs",
    "operator/src/experiment/apply.rs",
];

/// Returns the phrases in a line.
fn phrases(line: &str) -> Vec<&'static str> {
    let words: Vec<&str> = line
        .split(|c: char| !(c.is_alphanumeric() || c == '\'' || c == '_'))
        .filter(|word| !word.is_empty())
        .collect();
    let text = format!(" {} ", words.join(" ").to_lowercase());
    let mut found: Vec<_> =
        PHRASES.iter().copied().filter(|phrase| text.contains(phrase)).collect();
    let comment =
        line.trim_start().strip_prefix("//").map(|rest| rest.trim_start_matches(['/', '!']));
    if let Some(comment) = comment {
        found.extend(OPENINGS.iter().filter(|opening| comment.trim_start().starts_with(*opening)));
    }
    found
}

#[test]
fn texts_avoid_phrases_of_the_language_guide() {
    let patterns = ["*.rs", "*.md", "*.yaml", "*.toml", "*.tpl", "*.sh", "*.txt", "scripts"];
    let is_counted = |name: &String| {
        !EXEMPT.contains(&name.as_str()) && !LATER.iter().any(|start| name.starts_with(start))
    };
    let (mut num_lines, mut all) = (0, vec![]);
    for name in files(&patterns).into_iter().filter(is_counted) {
        let Ok(text) = std::fs::read_to_string(repository().join(&name)) else { continue };
        for (number, line) in (1..).zip(text.lines()) {
            num_lines += 1;
            all.extend(phrases(line).iter().map(|phrase| format!("{name}:{number}:{phrase}")));
        }
    }
    assert!(num_lines > 50_000, "only {num_lines} lines are counted");
    let per_thousand = all.len() as f64 * 1000.0 / f64::from(num_lines);
    println!("{per_thousand:.2} phrases per 1,000 lines");
    assert!(
        per_thousand <= PER_THOUSAND_MAX,
        "{per_thousand:.2} phrases per 1,000 lines; see docs/language.md\n{}",
        all.join("\n")
    );
}

#[test]
fn phrases_are_found_as_whole_words() {
    let check = |line: &str, expected: &[&str]| assert_eq!(phrases(line), expected, "{line}");
    check("/// What is due after a batch.", &["What "]);
    check("// Nobody, that is: whoever\twaits goes on.", &[" nobody ", " whoever ", " goes on "]);
    check("let somebody_else = 1; // whatsoever", &[]);
    check("the result of one's own loop", &[" of one's own "]);
    check("What the operator may do", &[]);
}
