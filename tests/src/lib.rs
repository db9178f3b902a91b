//! What the checks across crates share: where things lie, and one run of `stoker`.

use std::path::{Path, PathBuf};
use std::process::{Command, Output};

/// The repository's root: of the clone that cargo runs for, which need not be the one that this was
/// built in.
///
/// # Panics
///
/// If a test is run by something other than cargo.
pub fn repository() -> PathBuf {
    let package = std::env::var_os("CARGO_MANIFEST_DIR").expect("run the tests by `cargo test`");
    Path::new(&package).parent().map(Path::to_path_buf).unwrap_or_default()
}

/// A program built with this test, such as `stoker`.
///
/// # Panics
///
/// If it was not built: tests do not build it themselves.
pub fn program(name: &str) -> PathBuf {
    let test = std::env::current_exe().unwrap_or_default();
    let path = test.ancestors().nth(2).unwrap_or(Path::new("")).join(name);
    assert!(
        path.exists(),
        "{} is missing; run `cargo build --workspace`",
        path.display()
    );
    path
}

/// The folder that holds data sets, tools and builds; scripts/env.sh says the same.
///
/// # Panics
///
/// If neither `STOKER_CACHE`, `XDG_CACHE_HOME` nor `HOME` is set.
pub fn cache() -> PathBuf {
    let set = |name| std::env::var_os(name).filter(|it| !it.is_empty()).map(PathBuf::from);
    set("STOKER_CACHE")
        .or_else(|| set("XDG_CACHE_HOME").map(|it| it.join("stoker")))
        .or_else(|| set("HOME").map(|it| it.join(".cache/stoker")))
        .expect("HOME is not set")
}

/// Reports whether scripts/fetch-data has put a data set into the cache, and records the calling test as left
/// out otherwise.
#[track_caller]
pub fn has_data(name: &str) -> bool {
    let is_here = cache().join("data").join(name).is_dir();
    if !is_here {
        stoker_test_cluster::leave_out(format!("needs the data set {name}"));
    }
    is_here
}

/// Writes the files of CIFAR-10's binary version with 200 random images each, for tests that need its
/// format and shapes but not its content: no package contains the data set.
///
/// # Panics
///
/// If a file cannot be written.
pub fn write_random_cifar10(folder: &Path) {
    const NUM_IMAGES: usize = 200;
    const PIXELS: usize = 3 * 32 * 32;
    let mut state = 1_u64;
    // Knuth's MMIX generator; its upper bits are good enough for noise.
    let mut byte = || {
        state =
            state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        state.to_be_bytes()[0]
    };
    std::fs::create_dir_all(folder).expect("the folder can be created");
    let training = (1..=5).map(|number| format!("data_batch_{number}.bin"));
    for name in training.chain(["test_batch.bin".to_owned()]) {
        let mut bytes = Vec::with_capacity(NUM_IMAGES * (1 + PIXELS));
        for _ in 0..NUM_IMAGES {
            bytes.push(byte() % 10);
            bytes.extend((0..PIXELS).map(|_| byte()));
        }
        std::fs::write(folder.join(name), bytes).expect("the file can be written");
    }
}

/// `stoker` with arguments, not started yet. It starts with default signal dispositions: the tests
/// themselves may run under `nohup`.
pub fn stoker<I: AsRef<std::ffi::OsStr>>(arguments: impl IntoIterator<Item = I>) -> Command {
    let mut command = Command::new("env");
    command.arg("--default-signal=HUP,INT").arg(program("stoker")).args(arguments);
    command
}

/// Standard output and error of a finished program, for messages.
pub fn said(output: &Output) -> String {
    format!(
        "{}\n--- stdout\n{}\n--- stderr\n{}",
        output.status,
        String::from_utf8_lossy(&output.stdout),
        String::from_utf8_lossy(&output.stderr)
    )
}
