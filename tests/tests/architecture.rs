//! The shape of the house: who may depend on whom, and what every file begins with.

use std::path::PathBuf;
use std::process::Command;

use stoker_tests::{repository, said};

/// Packages that each of ours must not link, directly or through others, and why.
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
        "nor does the stock trainer",
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
            let linked = tree.lines().any(|it| it.split(' ').next() == Some(forbidden));
            assert!(!linked, "{package} links {forbidden}, but {why}");
        }
    }
}

/// All Rust sources that are ours.
fn sources() -> Vec<PathBuf> {
    let output = Command::new("git")
        .args(["ls-files", "--cached", "--others", "--exclude-standard", "*.rs"])
        .current_dir(repository())
        .output()
        .unwrap();
    assert!(output.status.success(), "{}", said(&output));
    let names = String::from_utf8(output.stdout).unwrap();
    let files: Vec<_> =
        names.lines().map(|it| repository().join(it)).filter(|it| it.exists()).collect();
    assert!(files.len() > 20, "git lists only {} sources", files.len());
    files
}

#[test]
fn every_file_says_what_it_is_for() {
    for path in sources() {
        let text = std::fs::read_to_string(&path).unwrap();
        assert!(
            text.starts_with("//! "),
            "{}:1: a file opens with a `//!` line saying what it is for",
            path.display()
        );
    }
}

#[test]
fn no_file_grows_beyond_reading() {
    for path in sources() {
        let text = std::fs::read_to_string(&path).unwrap();
        let lines = text.lines().take_while(|it| *it != "#[cfg(test)]").count();
        assert!(lines <= 500, "{}: {lines} lines before its tests; split it", path.display());
    }
}

/// Files with unsafe code, each with the decision that says why.
const UNSAFE: [(&str, &str); 2] = [
    ("trainer/src/cache/map.rs", "docs/decisions/0021-dataset-cache.md"),
    ("trainer/src/collective/nccl/library.rs", "docs/decisions/0015-gpus.md"),
];

#[test]
fn unsafe_code_stays_out() {
    for (file, decision) in UNSAFE {
        let text = std::fs::read_to_string(repository().join(decision)).unwrap();
        assert!(text.contains("unsafe"), "{decision} does not say why {file} is unsafe");
    }
    for path in
        sources().into_iter().filter(|it| !UNSAFE.iter().any(|(file, _)| it.ends_with(file)))
    {
        let text = std::fs::read_to_string(&path).unwrap();
        let word = concat!("unsafe", " {");
        assert!(!text.contains(word), "{}: unsafe code needs a decision record", path.display());
    }
}
