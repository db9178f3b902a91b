//! docs/tutorial.md does what it says: its code is the example's, and who follows it from an empty folder comes to its end.

use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::process::Command;

use stoker_tests::{has_data, program, repository, said};

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

/// Runs a block's lines as they stand there, and gives what they print.
fn shell(folder: &Path, lines: &str) -> String {
    let programs = program("stoker");
    let target = programs.ancestors().nth(2).unwrap();
    let path = std::env::var("PATH").unwrap_or_default();
    let path = format!("{}:{path}", programs.parent().unwrap().display());
    let mut command = Command::new("bash");
    command.args(["-e", "-c", lines]).current_dir(folder).env("PATH", path);
    command.env("CARGO_TARGET_DIR", target).env("CARGO_NET_OFFLINE", "true");
    let output = command.output().unwrap();
    assert!(output.status.success(), "{lines}{}", said(&output));
    String::from_utf8(output.stdout).unwrap()
}

/// The best trial's metric, as a run's last lines have it.
fn best(text: &str) -> f64 {
    let line = text.lines().rfind(|it| it.starts_with("best: trial ")).expect("a best trial");
    line.rsplit(' ').next().unwrap().parse().unwrap()
}

/// An empty folder with a clone in it, and `digits/target` where builds are. Always the same one: cargo takes a
/// clone elsewhere for another, and would compile it again.
fn empty_folder() -> PathBuf {
    let target = program("stoker").ancestors().nth(2).unwrap().to_owned();
    // There `cargo new` would add a member to this workspace.
    let remedy = "set CARGO_TARGET_DIR to a folder outside the clone, as scripts/env.sh does";
    assert!(!target.starts_with(repository()), "{remedy}");
    let folder = target.join("tmp/tutorial");
    let _ = std::fs::remove_dir_all(&folder);
    std::fs::create_dir_all(&folder).unwrap();
    symlink(repository(), folder.join("stoker")).unwrap();
    folder
}

/// Everything that the page says to do, but for the clone's build, which is this test's, and the cluster.
#[test]
fn the_tutorial_leads_from_an_empty_folder_to_a_search() {
    if !has_data("mnist") {
        return;
    }
    let (page, folder) = (page(), empty_folder());
    let commands = blocks(&page, "sh");
    let [clone, new, link, train, search, ranks, cluster] = &commands[..] else {
        panic!("other commands than this test knows: {commands:#?}");
    };

    // What is built is on the path already, and others use it.
    let is_built = |line: &&str| line.starts_with("cargo build") || line.starts_with("export PATH");
    assert_eq!(clone.lines().filter(is_built).count(), 2, "{clone}");
    let clone: Vec<&str> = clone.lines().filter(|line| !is_built(line)).collect();
    shell(&folder.join("stoker"), &clone.join("\n"));

    shell(&folder, new);
    let crate_folder = folder.join("digits");
    let write = |name: &str, text: &str| std::fs::write(crate_folder.join(name), text).unwrap();
    let manifest = std::fs::read_to_string(crate_folder.join("Cargo.toml")).unwrap();
    let [dependencies] = &blocks(&page, "toml")[..] else { panic!("one block for Cargo.toml") };
    assert!(manifest.ends_with("\n[dependencies]\n"), "{manifest}");
    write("Cargo.toml", &manifest.replace("[dependencies]\n", dependencies));
    write("src/main.rs", &blocks(&page, "rust").join("\n"));
    let [experiment, searched] = &blocks(&page, "yaml")[..] else { panic!("two experiments") };
    write("const.yaml", experiment);
    write("search.yaml", searched);
    // The versions that were tried, in the place of those that are newest today.
    write("Cargo.lock", &std::fs::read_to_string(repository().join("Cargo.lock")).unwrap());
    let target = program("stoker").ancestors().nth(2).unwrap().to_owned();
    symlink(&target, crate_folder.join("target")).unwrap();

    // The page names the usual place of the data, which `STOKER_CACHE` may have moved.
    let home = folder.join("home");
    std::fs::create_dir_all(home.join(".cache")).unwrap();
    symlink(stoker_tests::cache(), home.join(".cache/stoker")).unwrap();
    shell(&crate_folder, &format!("HOME={}\n{link}", home.display()));

    let text = shell(&crate_folder, train);
    assert!(
        text.contains("works: one batch, a validation, a checkpoint and its restore"),
        "{text}"
    );
    assert!(best(&text) > 0.96, "{text}");
    assert!(text.contains("/000000004000-"), "{text}");

    let text = shell(&crate_folder, search);
    assert!(best(&text) > 0.9, "{text}");

    let text = shell(&crate_folder, ranks);
    assert!(best(&text) > 0.96, "{text}");

    let help = shell(&crate_folder, "target/release/digits --help");
    assert!(help.contains("--hparam NAME=VALUE"), "{help}");
    assert!(cluster.starts_with("stoker experiment create search.yaml "), "{cluster}");
}
