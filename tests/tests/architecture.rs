//! Rules for the workspace: dependencies between packages, and the form of source files.

use std::process::Command;

use stoker_tests::{describe_output, files, packages, repository};

/// Packages that each package of the workspace must not link, directly or indirectly, and why.
const FORBIDDEN: &[(&str, &[&str], &str)] = &[
    ("stoker-api", &["tokio", "kube", "k8s-openapi", "stoker-experiment-engine"], "api is a leaf"),
    (
        "stoker-experiment-engine",
        &["tokio", "kube", "k8s-openapi", "rand", "burn"],
        "engine is pure",
    ),
    (
        "stoker-trainer",
        &["kube", "kube-core", "k8s-openapi", "schemars", "stoker-experiment-engine"],
        "the trainer does not know Kubernetes and decides nothing",
    ),
    (
        "stoker-kernels",
        &["tokio", "stoker-api", "stoker-storage", "stoker-trainer"],
        "operators are of use to any program with burn",
    ),
    (
        "stoker-examples",
        &["kube", "kube-core", "k8s-openapi", "schemars"],
        "the stock trainer does not know Kubernetes either",
    ),
    ("stoker-cli", &["burn", "stoker-trainer"], "the command line does not train"),
    (
        "stoker-ui",
        &["burn", "stoker-trainer", "kube-client"],
        "the page neither trains nor connects to a cluster: a source gives it its data",
    ),
    (
        "stoker-operator",
        &["burn", "stoker-trainer", "stoker-storage", "object_store"],
        "the operator neither trains nor reaches any storage",
    ),
];

/// `profile.dev` has the settings of dependencies; each of our packages overrides them.
#[test]
fn every_package_has_its_test_profile() {
    let manifest = std::fs::read_to_string(repository().join("Cargo.toml")).unwrap();
    let checks = "debug-assertions = true, overflow-checks = true }";
    for package in packages() {
        let start = format!("{} = {{ opt-level", package["name"].as_str().unwrap());
        let is_complete = |line: &str| line.starts_with(&start) && line.ends_with(checks);
        assert!(manifest.lines().any(is_complete), "Cargo.toml: {start} = ..., {checks}");
    }
}

#[test]
fn dependencies_point_one_way() {
    for (package, forbidden, why) in FORBIDDEN {
        let output = Command::new(env!("CARGO"))
            .args(["tree", "--offline", "--edges", "normal", "--prefix", "none", "--format", "{p}"])
            .args(["--package", package])
            .current_dir(repository())
            .output()
            .unwrap();
        assert!(output.status.success(), "{}", describe_output(&output));
        let tree = String::from_utf8(output.stdout).unwrap();
        for forbidden in *forbidden {
            let linked = tree.lines().any(|line| line.split(' ').next() == Some(forbidden));
            assert!(!linked, "{package} links {forbidden}, but {why}");
        }
    }
}

/// Returns name and text of all Rust source files of the repository.
fn sources() -> Vec<(String, String)> {
    let names = files(&["*.rs"]);
    assert!(names.len() > 20, "git lists only {} sources", names.len());
    let read = |name: String| {
        let text = std::fs::read_to_string(repository().join(&name)).unwrap();
        (name, text)
    };
    names.into_iter().map(read).collect()
}

#[test]
fn every_file_starts_with_a_module_comment() {
    for (name, text) in sources() {
        assert!(
            text.starts_with("//! "),
            "{name}:1: the module comment is missing; start the file with a `//!` line"
        );
    }
}

/// Maximum number of lines of a file before its tests.
const FILE_LINES_MAX: usize = 400;
/// Maximum number of lines of a function, from `fn` to its closing brace.
const FUNCTION_LINES_MAX: usize = 70;
/// Maximum number of characters in a line, also in comments, strings and macros.
const COLUMNS_MAX: usize = 100;

/// Applies `violations` to the text of each file, and fails with all of its errors.
#[track_caller]
fn check_sources(violations: impl Fn(&str) -> Vec<(usize, String)>) {
    let mut errors = vec![];
    for (name, text) in sources() {
        let violations = violations(&text).into_iter();
        errors.extend(violations.map(|(line, error)| format!("{name}:{line}: {error}")));
    }
    assert!(errors.is_empty(), "{} violations:\n{}", errors.len(), errors.join("\n"));
}

#[test]
fn files_have_at_most_400_lines_before_tests() {
    check_sources(|text| {
        let num = text.lines().take_while(|line| *line != "#[cfg(test)]").count();
        let error = format!("{num} lines before the tests exceed {FILE_LINES_MAX}; split the file");
        if num > FILE_LINES_MAX { vec![(num, error)] } else { vec![] }
    });
}

#[test]
fn functions_have_at_most_70_lines() {
    check_sources(|text| {
        let long = functions(text).into_iter().filter(|function| function.num > FUNCTION_LINES_MAX);
        long.map(|Function { name, line, num }| {
            let error = format!("the {num} lines of `{name}` exceed {FUNCTION_LINES_MAX}");
            (line, format!("{error}; extract a function, or make a table a constant"))
        })
        .collect()
    });
}

#[test]
fn lines_have_at_most_100_columns() {
    check_sources(|text| {
        let numbered = (1..).zip(text.lines().map(|line| line.chars().count()));
        numbered
            .filter(|(_, num)| *num > COLUMNS_MAX)
            .map(|(line, num)| {
                (line, format!("{num} columns exceed {COLUMNS_MAX}; break the line"))
            })
            .collect()
    });
}

/// A function in a source file.
#[derive(Debug)]
struct Function<'a> {
    name: &'a str,
    /// Line of `fn`, from 1.
    line: usize,
    /// Number of lines, from `fn` to the closing brace.
    num: usize,
}

/// Finds functions by rustfmt's layout: the closing brace has the same indentation as `fn`.
fn functions<'a>(text: &'a str) -> Vec<Function<'a>> {
    let lines: Vec<&'a str> = text.lines().collect();
    let end_of = |start: usize| {
        let rest = &lines[start..];
        let signature = rest.iter().position(|line| line.ends_with(['{', '}', ';']))?;
        // Neither a declaration in a trait nor an empty body has more lines.
        if !rest[signature].ends_with('{') {
            return Some(signature);
        }
        let indentation = rest[0].len() - rest[0].trim_start().len();
        let closes = |line: &&str| line.trim_end().len() == indentation + 1 && line.ends_with('}');
        rest.iter().position(closes)
    };
    let function = |(idx, line): (usize, &&'a str)| {
        let (name, num) = (function_name(line)?, end_of(idx)? + 1);
        Some(Function { name, line: idx + 1, num })
    };
    lines.iter().enumerate().filter_map(function).collect()
}

/// Returns the name of the function whose signature starts in this line.
fn function_name(line: &str) -> Option<&str> {
    let (qualifiers, rest) = line.trim_start().split_once("fn ")?;
    let is_qualifier = |word: &str| {
        matches!(word, "const" | "async" | "unsafe" | "extern" | "\"C\"")
            || word.starts_with("pub")
            || word.ends_with(')')
    };
    qualifiers.split_whitespace().all(is_qualifier).then_some(())?;
    rest.split(['(', '<']).next()
}

#[test]
fn function_lengths_follow_the_layout() {
    let check = |text: &str, expected: &[(&str, usize, usize)]| {
        let functions = functions(text);
        let actual: Vec<_> =
            functions.iter().map(|function| (function.name, function.line, function.num)).collect();
        assert_eq!(actual, expected, "{text}");
    };
    check("fn a() {\n    1\n}\n", &[("a", 1, 3)]);
    check("\npub(in super::super) async fn a<T>(\n    x: T,\n) {\n}\n", &[("a", 2, 4)]);
    check("impl A {\n    fn a() {\n        {\n        }\n    }\n}\n", &[("a", 2, 4)]);
    check("trait A {\n    fn a()\n    where\n        Self: Sized;\n}\n", &[("a", 2, 3)]);
    check("fn a() {}\nfn b() {\n}\n", &[("a", 1, 1), ("b", 2, 2)]);
    check("// a fn b() {\nlet a: fn (u32) = b;\n", &[]);
}

/// Files with unsafe code, each with the decision record that explains it.
const UNSAFE: [(&str, &str); 10] = [
    ("kernels/src/gpu/cublas.rs", "docs/decisions/0058-cublas.md"),
    ("kernels/src/gpu/cublas/library.rs", "docs/decisions/0058-cublas.md"),
    ("kernels/src/machine.rs", "docs/decisions/0037-own-kernels.md"),
    ("kernels/src/new_values.rs", "docs/decisions/0061-new-values.md"),
    ("kernels/src/threads.rs", "docs/decisions/0046-waiting-threads.md"),
    ("trainer/src/allocator.rs", "docs/decisions/0053-system-allocator.md"),
    ("trainer/src/cache/mapped_file.rs", "docs/decisions/0021-dataset-cache.md"),
    ("trainer/src/collective/nccl/library.rs", "docs/decisions/0015-gpus.md"),
    ("trainer/src/collective/pipe/memory.rs", "docs/decisions/0063-shared-memory.md"),
    ("trainer/src/device/driver.rs", "docs/decisions/0015-gpus.md"),
];

#[test]
fn unsafe_code_needs_a_decision_record() {
    for (file, decision) in UNSAFE {
        let text = std::fs::read_to_string(repository().join(decision)).unwrap();
        assert!(text.contains("unsafe"), "{decision} does not explain why {file} is unsafe");
    }
    let is_exempt = |name: &str| UNSAFE.iter().any(|(file, _)| *file == name);
    for (name, text) in sources().into_iter().filter(|(name, _)| !is_exempt(name)) {
        let word = concat!("unsafe", " {");
        assert!(!text.contains(word), "{name}: unsafe code needs a decision record");
    }
}
