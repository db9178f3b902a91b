//! Rules for the workspace: dependencies between packages, and the form of source files.

use std::path::PathBuf;
use std::process::Command;

use stoker_tests::{files, repository, said};

/// Packages that each package of the workspace must not link, directly or indirectly, and why.
const FORBIDDEN: &[(&str, &[&str], &str)] = &[
    ("stoker-api", &["tokio", "kube", "k8s-openapi", "stoker-engine"], "api is a leaf"),
    ("stoker-engine", &["tokio", "kube", "k8s-openapi", "rand", "burn"], "engine is pure"),
    (
        "stoker-trainer",
        &["kube", "kube-core", "k8s-openapi", "schemars", "stoker-engine"],
        "the trainer does not know Kubernetes and decides nothing",
    ),
    (
        "stoker-examples",
        &["kube", "kube-core", "k8s-openapi", "schemars"],
        "the stock trainer does not know Kubernetes either",
    ),
    ("stoker", &["burn", "stoker-trainer"], "the command line does not train"),
    (
        "stoker-operator",
        &["burn", "stoker-trainer", "stoker-storage", "object_store"],
        "the operator neither trains nor reaches any storage",
    ),
];

#[test]
fn dependencies_point_one_way() {
    for (package, forbidden, why) in FORBIDDEN {
        let output = Command::new(env!("CARGO"))
            .args(["tree", "--offline", "--edges", "normal", "--prefix", "none", "--format", "{p}"])
            .args(["--package", package])
            .current_dir(repository())
            .output()
            .unwrap();
        assert!(output.status.success(), "{}", said(&output));
        let tree = String::from_utf8(output.stdout).unwrap();
        for forbidden in *forbidden {
            let linked = tree.lines().any(|line| line.split(' ').next() == Some(forbidden));
            assert!(!linked, "{package} links {forbidden}, but {why}");
        }
    }
}

/// Returns all Rust source files of the repository.
fn sources() -> Vec<PathBuf> {
    let files: Vec<_> = files(&["*.rs"]).iter().map(|name| repository().join(name)).collect();
    assert!(files.len() > 20, "git lists only {} sources", files.len());
    files
}

#[test]
fn every_file_starts_with_a_module_comment() {
    for path in sources() {
        let text = std::fs::read_to_string(&path).unwrap();
        assert!(
            text.starts_with("//! "),
            "{}:1: the module comment is missing; start the file with a `//!` line",
            path.display()
        );
    }
}

#[test]
fn files_have_at_most_500_lines_before_tests() {
    for path in sources() {
        let text = std::fs::read_to_string(&path).unwrap();
        let lines = text.lines().take_while(|line| *line != "#[cfg(test)]").count();
        assert!(lines <= 500, "{}: {lines} lines before its tests; split the file", path.display());
    }
}

/// Files with unsafe code, each with the decision record that explains it.
const UNSAFE: [(&str, &str); 2] = [
    ("trainer/src/cache/mapped_file.rs", "docs/decisions/0021-dataset-cache.md"),
    ("trainer/src/collective/nccl/library.rs", "docs/decisions/0015-gpus.md"),
];

#[test]
fn unsafe_code_needs_a_decision_record() {
    for (file, decision) in UNSAFE {
        let text = std::fs::read_to_string(repository().join(decision)).unwrap();
        assert!(text.contains("unsafe"), "{decision} does not explain why {file} is unsafe");
    }
    let is_exempt = |path: &PathBuf| UNSAFE.iter().any(|(file, _)| path.ends_with(file));
    for path in sources().into_iter().filter(|path| !is_exempt(path)) {
        let text = std::fs::read_to_string(&path).unwrap();
        let word = concat!("unsafe", " {");
        assert!(!text.contains(word), "{}: unsafe code needs a decision record", path.display());
    }
}
