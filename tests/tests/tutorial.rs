//! docs/tutorial.md does what it says: its code is the example's, and both of its experiments run.

use std::path::Path;

use stoker_tests::{program, repository, said, stoker};

use crate::first_light::last_line;

/// The blocks of a language, in order, as they stand in a page.
fn blocks(page: &str, language: &str) -> Vec<String> {
    let mut blocks = vec![];
    let mut lines = page.lines();
    while let Some(line) = lines.next() {
        if line == format!("```{language}") {
            let block = lines.by_ref().take_while(|it| *it != "```");
            blocks.push(block.map(|it| format!("{it}\n")).collect());
        }
    }
    blocks
}

fn page() -> String {
    std::fs::read_to_string(repository().join("docs/tutorial.md")).unwrap()
}

fn example(name: &str) -> String {
    std::fs::read_to_string(repository().join("examples/tutorial").join(name)).unwrap()
}

#[test]
fn the_tutorials_code_is_the_examples() {
    assert_eq!(blocks(&page(), "rust").join("\n"), example("main.rs"));
    assert_eq!(blocks(&page(), "yaml"), [example("const.yaml"), example("search.yaml")]);
}

/// Runs an experiment file as the tutorial does, in a folder as it makes one.
fn run(folder: &Path, file: &str, more: &[&str]) -> std::process::Output {
    let file = folder.join(file);
    stoker(["run", "--output", "json"]).arg(file).args(more).current_dir(folder).output().unwrap()
}

#[test]
fn the_tutorials_experiments_run_as_it_says() {
    let digits = program("digits");
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    for name in ["const.yaml", "search.yaml"] {
        std::fs::write(folder.join(name), example(name)).unwrap();
    }
    std::fs::create_dir_all(folder.join("target/release")).unwrap();
    std::os::unix::fs::symlink(digits, folder.join("target/release/digits")).unwrap();
    std::os::unix::fs::symlink(stoker_tests::cache().join("data/mnist"), folder.join("mnist"))
        .unwrap();

    let tried = run(folder, "const.yaml", &["--test"]);
    assert!(tried.status.success(), "{}", said(&tried));

    let output = run(folder, "const.yaml", &[]);
    assert!(output.status.success(), "{}", said(&output));
    let line = last_line(&output);
    let accuracy: f64 = line["best"]["metric"].as_str().unwrap().parse().unwrap();
    assert!(accuracy > 0.96, "{line}");
    let checkpoint = line["best"]["checkpoint"].as_str().unwrap();
    assert!(checkpoint.contains("/000000004000-"), "{line}");

    let output = run(folder, "search.yaml", &[]);
    assert!(output.status.success(), "{}", said(&output));
    let line = last_line(&output);
    assert_eq!(line["trials"], 4, "{line}");
    let accuracy: f64 = line["best"]["metric"].as_str().unwrap().parse().unwrap();
    assert!(accuracy > 0.9, "{line}");
}
