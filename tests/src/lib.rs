//! Shared code of the cross-crate tests: paths, data sets and running `stoker`.

use std::path::{Path, PathBuf};
use std::process::{Command, Output};

/// Returns the packages of the workspace, as `cargo metadata` prints them.
///
/// # Panics
///
/// `cargo metadata` failed.
pub fn packages() -> Vec<serde_json::Value> {
    let output = Command::new(env!("CARGO"))
        .args(["metadata", "--offline", "--no-deps", "--format-version", "1"])
        .current_dir(repository())
        .output()
        .expect("cannot start cargo");
    assert!(output.status.success(), "{}", describe_output(&output));
    let metadata: serde_json::Value =
        serde_json::from_slice(&output.stdout).expect("cargo metadata prints JSON");
    metadata["packages"].as_array().expect("cargo metadata prints packages").clone()
}

/// Returns the root of the repository that cargo runs in. The test may have been built in another
/// clone.
///
/// # Panics
///
/// If the test is not run by cargo.
pub fn repository() -> PathBuf {
    let package = std::env::var_os("CARGO_MANIFEST_DIR").expect("run the tests by `cargo test`");
    Path::new(&package).parent().map(Path::to_path_buf).unwrap_or_default()
}

/// Returns the path of a program of the workspace, such as `stoker`.
///
/// # Panics
///
/// If the program was not built. Tests do not build programs.
pub fn program(name: &str) -> PathBuf {
    let test = std::env::current_exe().unwrap_or_default();
    let path = test.ancestors().nth(2).unwrap_or(Path::new("")).join(name);
    assert!(path.exists(), "{} is missing; run `cargo build --workspace`", path.display());
    path
}

/// Returns the directory of data sets, tools and builds. scripts/env.sh uses the same rule.
///
/// # Panics
///
/// If neither `STOKER_CACHE`, `XDG_CACHE_HOME` nor `HOME` is set.
pub fn cache() -> PathBuf {
    let set = |name| std::env::var_os(name).filter(|value| !value.is_empty()).map(PathBuf::from);
    set("STOKER_CACHE")
        .or_else(|| set("XDG_CACHE_HOME").map(|path| path.join("stoker")))
        .or_else(|| set("HOME").map(|path| path.join(".cache/stoker")))
        .expect("HOME is not set")
}

/// Returns the paths of all files that match, relative to the repository's root. Omits deleted
/// files and those that git ignores. `*` also matches `/`.
///
/// # Panics
///
/// Panics if git fails or no file matches.
pub fn files(patterns: &[&str]) -> Vec<String> {
    let output = Command::new("git")
        .args(["ls-files", "--cached", "--others", "--exclude-standard", "--"])
        .args(patterns)
        .current_dir(repository())
        .output()
        .expect("git is installed");
    assert!(output.status.success(), "{}", describe_output(&output));
    let names = String::from_utf8_lossy(&output.stdout).into_owned();
    let names = names.lines().filter(|name| repository().join(name).exists());
    let names: Vec<String> = names.map(str::to_owned).collect();
    assert!(!names.is_empty(), "git lists no files for {patterns:?}");
    names
}

/// Returns whether scripts/fetch-data has downloaded a data set. If not, records the calling test
/// as skipped.
#[track_caller]
pub fn has_data(name: &str) -> bool {
    let is_cached = cache().join("data").join(name).is_dir();
    if !is_cached {
        stoker_test_cluster::record_skip(format!("needs the data set {name}"));
    }
    is_cached
}

/// Writes the files of CIFAR-10's binary version with 300 random images each. Tests that need only
/// the format and shapes of the data set use it, because no package contains the original. The
/// brightness of an image follows its label, so that the loss decreases between validations.
///
/// # Panics
///
/// If a file cannot be written.
pub fn write_random_cifar10(folder: &Path) {
    const NUM_IMAGES: usize = 300;
    const PIXELS: usize = 3 * 32 * 32;
    let mut state = 1_u64;
    // Knuth's MMIX generator; its upper bits are good enough for noise.
    let mut byte = || {
        state =
            state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        state.to_be_bytes()[0]
    };
    std::fs::create_dir_all(folder).expect("the directory can be created");
    let training = (1..=5).map(|number| format!("data_batch_{number}.bin"));
    for name in training.chain(["test_batch.bin".to_owned()]) {
        let mut bytes = Vec::with_capacity(NUM_IMAGES * (1 + PIXELS));
        for _ in 0..NUM_IMAGES {
            let label = byte() % 10;
            bytes.push(label);
            bytes.extend((0..PIXELS).map(|_| 22 * label + byte() / 8));
        }
        std::fs::write(folder.join(name), bytes).expect("the file can be written");
    }
}

/// Returns a command that runs `stoker` with default signal dispositions, because the tests
/// themselves may run under `nohup`.
pub fn stoker<I: AsRef<std::ffi::OsStr>>(arguments: impl IntoIterator<Item = I>) -> Command {
    let mut command = Command::new("env");
    command.arg("--default-signal=HUP,INT").arg(program("stoker")).args(arguments);
    command
}

/// Formats the status and the output of a finished program, for assertion messages.
pub fn describe_output(output: &Output) -> String {
    format!(
        "{}\n--- stdout\n{}\n--- stderr\n{}",
        output.status,
        String::from_utf8_lossy(&output.stdout),
        String::from_utf8_lossy(&output.stderr)
    )
}

/// Returns a trial's facts without their times, which differ between runs.
pub fn facts_without_times(facts: &serde_json::Value) -> serde_json::Value {
    let mut facts = facts.clone();
    for fact in facts.as_array_mut().into_iter().flatten() {
        let fields = fact.as_object_mut().into_iter().flat_map(|fact| fact.values_mut());
        for fact in fields.filter_map(serde_json::Value::as_object_mut) {
            fact.remove("at");
        }
    }
    facts
}
