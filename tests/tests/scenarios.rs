//! Checks that the tests named in docs/scenarios.md and in the README exist.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

use stoker_tests::{packages, repository};

/// Areas that the page covers.
const AREAS: [&str; 12] = [
    "batch inference",
    "callbacks",
    "custom loops",
    "data",
    "errors",
    "gangs",
    "launcher",
    "logs",
    "reports",
    "resuming",
    "search",
    "training",
];

/// Collects the source files of a crate: its root and all modules that the root declares, directly
/// or indirectly. A file that no module declares is not compiled, so its tests do not exist.
fn modules(file: &Path, is_root: bool, files: &mut BTreeSet<PathBuf>) {
    if !files.insert(file.to_owned()) {
        return;
    }
    let text = std::fs::read_to_string(file).unwrap_or_else(|error| panic!("{file:?}: {error}"));
    let folder = file.parent().unwrap();
    let is_mod_file = is_root || file.ends_with("mod.rs");
    let folder_of_modules = match is_mod_file {
        true => folder.to_owned(),
        false => file.with_extension(""),
    };
    let mut path = None;
    for line in text.lines().map(str::trim) {
        if let Some(rest) = line.strip_prefix("#[path = \"") {
            path = rest.split('"').next();
        }
        let words = line.split_once("mod ").filter(|(before, _)| {
            before.is_empty() || *before == "pub " || *before == "pub(crate) "
        });
        let Some(name) = words.and_then(|(_, name)| name.strip_suffix(';')) else { continue };
        let candidates = match path.take() {
            // The path is relative to the file's directory, because the module is not nested in
            // another module of the file.
            Some(path) => vec![folder.join(path)],
            None => {
                let below = |name: String| folder_of_modules.join(name);
                vec![below(format!("{name}.rs")), below(format!("{name}/mod.rs"))]
            }
        };
        // Generated modules have no file here.
        if let Some(path) = candidates.into_iter().find(|path| path.exists()) {
            modules(&path, false, files);
        }
    }
}

/// Returns the names of functions with the attribute `#[test]` or `#[tokio::test]`, except ignored
/// ones.
fn tests_of(text: &str) -> Vec<&str> {
    let (mut tests, mut is_test, mut is_ignored) = (vec![], false, false);
    for line in text.lines().map(str::trim) {
        if line.starts_with("//") {
            continue;
        }
        if line.starts_with("#[") {
            is_test |= line.starts_with("#[test]") || line.starts_with("#[tokio::test");
            is_ignored |= line.starts_with("#[ignore");
            continue;
        }
        let function = line.trim_start_matches("async ").strip_prefix("fn ");
        if let Some(name) = function.and_then(|rest| rest.split('(').next())
            && is_test
            && !is_ignored
        {
            tests.push(name);
        }
        (is_test, is_ignored) = (false, false);
    }
    tests
}

/// Returns the root file of each target of the workspace: libraries, programs and tests.
fn roots() -> Vec<PathBuf> {
    let packages = packages();
    let targets = packages.iter().flat_map(|package| package["targets"].as_array().unwrap());
    targets.map(|target| PathBuf::from(target["src_path"].as_str().unwrap())).collect()
}

#[test]
fn tests_named_by_scenarios_exist() {
    let page = std::fs::read_to_string(repository().join("docs/scenarios.md")).unwrap();
    let mut files = BTreeSet::new();
    for root in roots() {
        modules(&root, true, &mut files);
    }
    let texts: Vec<String> =
        files.iter().map(|file| std::fs::read_to_string(file).unwrap()).collect();
    let tests: BTreeSet<&str> = texts.iter().flat_map(|text| tests_of(text)).collect();
    let rows: Vec<&str> = page.lines().filter(|line| line.starts_with("| ")).skip(1).collect();
    for area in AREAS {
        let start = format!("| {area} |");
        assert!(rows.iter().any(|row| row.starts_with(&start)), "no row {area}");
    }
    for row in rows {
        let named = row.rsplit(" | ").next().unwrap().split('`').skip(1).step_by(2);
        for test in named {
            assert!(tests.contains(test), "{test} is not a test:\n{row}");
        }
    }
}

/// The README proves each reason by tests: `name` ([file](path)).
#[test]
fn tests_named_by_the_readme_are_in_their_files() {
    let page = std::fs::read_to_string(repository().join("README.md")).unwrap();
    let proofs = page.lines().filter_map(|line| line.trim().strip_prefix("Proof: "));
    let named = proofs.flat_map(|proofs| proofs.split("), "));
    let mut num_named = 0;
    for proof in named {
        let name = proof.split('`').nth(1).unwrap();
        let path = proof.split("](").nth(1).and_then(|rest| rest.split(')').next()).unwrap();
        let text = std::fs::read_to_string(repository().join(path)).unwrap();
        // Tests of properties have no attribute that a line shows.
        let is_there = tests_of(&text).contains(&name) || text.contains(&format!("fn {name}("));
        assert!(is_there, "README.md: {path} has no test {name}");
        num_named += 1;
    }
    assert!(num_named >= 6, "{num_named} proofs");
}

#[test]
fn only_functions_with_a_test_attribute_count() {
    let text = "
        /// #[test]
        fn in_a_comment() {}
        // #[test]
        // fn commented_out() {}
        fn helper() {}
        #[test]
        fn plain() {}
        #[test]
        #[should_panic(expected = \"x\")]
        fn with_more_attributes() {}
        #[tokio::test(start_paused = true)]
        async fn asynchronous() {}
        #[test]
        #[ignore = \"slow\"]
        fn ignored() {}
        #[test]
        fn of_proptest(
    ";
    let expected = ["plain", "with_more_attributes", "asynchronous", "of_proptest"];
    assert_eq!(tests_of(text), expected);
}

#[test]
fn undeclared_files_do_not_count() {
    let folder = tempfile::tempdir().unwrap();
    let write = |name: &str, text: &str| {
        let path = folder.path().join(name);
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        std::fs::write(path, text).unwrap();
    };
    write("lib.rs", "mod a;\n#[path = \"other/b.rs\"]\nmod b;\n// mod c;\n");
    write("a.rs", "#[cfg(test)]\nmod tests;\n");
    write("a/tests.rs", "");
    write("other/b.rs", "pub mod d {\n}\n");
    write("c.rs", "");
    let mut files = BTreeSet::new();
    modules(&folder.path().join("lib.rs"), true, &mut files);
    let names: Vec<_> = files
        .iter()
        .map(|file| file.strip_prefix(folder.path()).unwrap().to_str().unwrap())
        .collect();
    assert_eq!(names, ["a/tests.rs", "a.rs", "lib.rs", "other/b.rs"]);
}
