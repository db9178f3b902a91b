//! Checks docs/tutorial.md: its code equals that of the example, and its commands work from an
//! empty directory.

use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::process::Command;

use stoker_tests::{describe_output, has_data, program, repository};

/// Returns the code blocks of a language, in page order.
fn blocks(page: &str, language: &str) -> Vec<String> {
    let mut blocks = vec![];
    let mut lines = page.lines();
    while let Some(line) = lines.next() {
        if line == format!("```{language}") {
            let block = lines.by_ref().take_while(|line| *line != "```");
            blocks.push(block.map(|line| format!("{line}\n")).collect());
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
fn tutorial_code_matches_the_example() {
    assert_eq!(blocks(&page(), "rust").join("\n"), example("main.rs"));
    assert_eq!(blocks(&page(), "yaml"), [example("const.yaml"), example("search.yaml")]);
}

/// Runs the lines of a block with bash, and returns the standard output.
fn shell(folder: &Path, lines: &str) -> String {
    let programs = program("stoker");
    let target = programs.ancestors().nth(2).unwrap();
    let path = std::env::var("PATH").unwrap_or_default();
    let path = format!("{}:{path}", programs.parent().unwrap().display());
    let mut command = Command::new("bash");
    command.args(["-e", "-c", lines]).current_dir(folder).env("PATH", path);
    command.env("CARGO_TARGET_DIR", target).env("CARGO_NET_OFFLINE", "true");
    let output = command.output().unwrap();
    assert!(output.status.success(), "{lines}{}", describe_output(&output));
    String::from_utf8(output.stdout).unwrap()
}

/// Parses the best trial's metric from the output of a run.
fn best(text: &str) -> f64 {
    let line = text.lines().rfind(|line| line.starts_with("best: trial ")).expect("no best trial");
    // The length follows, if the result is not at the full length.
    let line = line.split(" after ").next().unwrap();
    line.rsplit(' ').next().unwrap().parse().unwrap()
}

/// Returns the name and version of each package in a lock file.
fn locked(folder: &Path) -> Vec<String> {
    let text = std::fs::read_to_string(folder.join("Cargo.lock")).unwrap();
    let packages = text.split("[[package]]\n").skip(1);
    packages.map(|package| package.lines().take(2).collect::<Vec<_>>().join("\n")).collect()
}

/// Creates an empty directory with a link to the repository. All runs use the same path, because
/// cargo compiles a package again if its path has changed.
fn empty_folder() -> PathBuf {
    let target = program("stoker").ancestors().nth(2).unwrap().to_owned();
    // Inside the repository, `cargo new` would add a member to its workspace.
    let remedy = "set CARGO_TARGET_DIR to a directory outside the clone, as scripts/env.sh does";
    assert!(!target.starts_with(repository()), "the build directory is in the clone; {remedy}");
    let folder = target.join("tmp/tutorial");
    let _ = std::fs::remove_dir_all(&folder);
    std::fs::create_dir_all(&folder).unwrap();
    symlink(repository(), folder.join("stoker")).unwrap();
    folder
}

/// Runs all commands of the page, except those that build the clone or need a cluster.
#[test]
fn tutorial_commands_work_from_an_empty_directory() {
    if !has_data("mnist") {
        return;
    }
    let (page, folder) = (page(), empty_folder());
    let commands = blocks(&page, "sh");
    let [clone, new, link, train, search, ranks, cluster] = &commands[..] else {
        panic!("unexpected number of commands: {commands:#?}");
    };

    // Skip the build: the programs are already built and in `PATH`, and other tests use them.
    let is_built = |line: &&str| {
        [". scripts/env.sh", "cargo build", "export PATH"].iter().any(|word| line.starts_with(word))
    };
    assert_eq!(clone.lines().filter(is_built).count(), 3, "{clone}");
    let clone: Vec<&str> = clone.lines().filter(|line| !is_built(line)).collect();
    shell(&folder.join("stoker"), &clone.join("\n"));

    shell(&folder, new);
    let crate_folder = folder.join("digits");
    let write = |name: &str, text: &str| std::fs::write(crate_folder.join(name), text).unwrap();
    let manifest = std::fs::read_to_string(crate_folder.join("Cargo.toml")).unwrap();
    let [dependencies] = &blocks(&page, "toml")[..] else { panic!("not one TOML block") };
    assert!(manifest.ends_with("\n[dependencies]\n"), "{manifest}");
    write("Cargo.toml", &manifest.replace("[dependencies]\n", dependencies));
    write("src/main.rs", &blocks(&page, "rust").join("\n"));
    let [experiment, searched] = &blocks(&page, "yaml")[..] else { panic!("not two YAML blocks") };
    write("const.yaml", experiment);
    write("search.yaml", searched);
    // Compiling burn again for a package outside the workspace would take ten minutes. So `cargo
    // check` replaces the build, and the example, which has the same code, runs instead.
    let release = crate_folder.join("target/release");
    std::fs::create_dir_all(&release).unwrap();
    symlink(program("digits"), release.join("digits")).unwrap();
    let (build, train) = train.split_once('\n').unwrap();
    assert_eq!(build, "cargo build --release");

    shell(&crate_folder, link);

    shell(&crate_folder, "cargo check");
    let tested = locked(&repository());
    let others: Vec<String> =
        locked(&crate_folder).into_iter().filter(|package| !tested.contains(package)).collect();
    assert_eq!(others, ["name = \"digits\"\nversion = \"0.1.0\""]);
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
