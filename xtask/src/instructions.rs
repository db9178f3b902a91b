//! `cargo xtask bench instructions`: counts the instructions of training steps, all-reduces, search
//! decisions and reports with valgrind, and compares them with recorded numbers.
//!
//! Counts hardly depend on the machine and on other work, so they show a regression of a few
//! percent, which times do not. A program runs twice, and the second run repeats the work once
//! more: the difference is the work without the start of the program.

use std::collections::BTreeMap;
use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

use crate::repository;

/// Recorded counts: for each version of the compiler, the counts by name.
const RECORD: &str = "benches/instructions.json";
/// Largest change of a count, in percent of the recorded one.
const TOLERANCE_PERCENT: u64 = 5;
/// Number of trials of a search of `decide-side` and `record-side`.
const TRIALS: u64 = 1_000;
/// Number of reports for a line of `report-side`.
const REPORTS: u64 = 1_000;

type Counts = BTreeMap<String, u64>;

/// Why the counts cannot be taken, or differ from the recorded ones.
#[derive(Debug, thiserror::Error)]
pub(crate) enum CountError {
    #[error("cannot run valgrind: {0}; if it is missing, install Debian's package `valgrind`")]
    Valgrind(std::io::Error),
    #[error("cannot start {0}: {1}")]
    Start(&'static str, std::io::Error),
    #[error("{0} failed; the output above has the reason")]
    Failed(&'static str),
    #[error("valgrind printed no number of instructions for {0}:\n{1}")]
    NoCount(&'static str, String),
    #[error("no port of this machine is free for ranks: {0}")]
    Port(stoker_test_cluster::Error),
    #[error("cannot {0} {RECORD}: {1}")]
    Record(&'static str, std::io::Error),
    #[error(
        "{0} changed by more than {TOLERANCE_PERCENT} %; if that is intended, record the new \
         numbers with `cargo xtask bench instructions --update`"
    )]
    Changed(String),
}

/// Something to count.
struct Subject {
    name: &'static str,
    package: &'static str,
    arguments: &'static [&'static str],
    /// Input on which the program does the work, once more with each line.
    line: &'static str,
    /// Number of units of work for a line.
    units: u64,
    /// Number of ranks. Rank 0 is counted, and the others run without valgrind.
    ranks: usize,
}

const SUBJECTS: [Subject; 7] = [
    Subject {
        name: "training step of the MLP",
        package: "stoker-bench",
        arguments: &["side", "step", "mlp", "--folder", "unused"],
        line: "1",
        units: 1,
        ranks: 1,
    },
    Subject {
        name: "training step of the CNN",
        package: "stoker-bench",
        arguments: &["side", "step", "cnn", "--folder", "unused"],
        line: "1",
        units: 1,
        ranks: 1,
    },
    Subject {
        name: "training step of the GPT",
        package: "stoker-bench",
        arguments: &["side", "step", "gpt", "--folder", "unused"],
        line: "1",
        units: 1,
        ranks: 1,
    },
    Subject {
        name: "all-reduce of 1 MiB",
        package: "stoker-bench",
        arguments: &["sum-side"],
        line: "1048576 20",
        units: 20,
        ranks: 2,
    },
    Subject {
        name: "decision of ASHA",
        package: "stoker-search-bench",
        arguments: &["decide-side"],
        line: "asyncHalving",
        units: TRIALS,
        ranks: 1,
    },
    Subject {
        name: "decision of ASHA and its record",
        package: "stoker-search-bench",
        arguments: &["record-side"],
        line: "asyncHalving",
        units: TRIALS,
        ranks: 1,
    },
    Subject {
        name: "report of a validation",
        package: "stoker-search-bench",
        arguments: &["report-side"],
        line: "1",
        units: REPORTS,
        ranks: 1,
    },
];

/// Counts, prints, and compares with the record, or replaces the record with `--update`.
///
/// # Errors
///
/// See [`CountError`].
pub(crate) fn run(is_update: bool) -> Result<(), CountError> {
    let release = build()?;
    let mut counts = Counts::new();
    for subject in &SUBJECTS {
        counts.insert(subject.name.to_owned(), count(subject, &release)?);
    }
    let compiler = compiler()?;
    let path = repository().join(RECORD);
    let mut record = read(&path)?;
    if is_update {
        record.insert(compiler, counts);
        let text = serde_json::to_string_pretty(&record).unwrap_or_default() + "\n";
        return std::fs::write(path, text).map_err(|error| CountError::Record("write", error));
    }
    let Some(recorded) = record.get(&compiler) else {
        counts.iter().for_each(|(name, count)| println!("{name:<34} {count:>14}"));
        println!("no numbers of {compiler} are recorded; `--update` records these");
        return Ok(());
    };
    let changed = compare(recorded, &counts);
    if changed.is_empty() { Ok(()) } else { Err(CountError::Changed(changed.join(", "))) }
}

/// Prints both counts of each name, and returns the names of those that differ too much.
fn compare(recorded: &Counts, counts: &Counts) -> Vec<String> {
    println!("{:<34} {:>14} {:>14} {:>8}", "instructions", "now", "recorded", "ratio");
    let mut changed = vec![];
    for (name, now) in counts {
        let Some(before) = recorded.get(name) else {
            println!("{name:<34} {now:>14} {:>14}", "-");
            continue;
        };
        let ratio = *now as f64 / (*before).max(1) as f64;
        println!("{name:<34} {now:>14} {before:>14} {ratio:>8.3}");
        if 100 * now.abs_diff(*before) > TOLERANCE_PERCENT * before {
            changed.push(name.clone());
        }
    }
    changed
}

fn count(subject: &Subject, release: &Path) -> Result<u64, CountError> {
    // The first line also initializes.
    let once = instructions(subject, release, 1)?;
    let twice = instructions(subject, release, 2)?;
    Ok(twice.saturating_sub(once) / subject.units)
}

/// Returns the instructions of a program that gets this number of lines.
fn instructions(subject: &Subject, release: &Path, lines: usize) -> Result<u64, CountError> {
    let port = if subject.ranks > 1 { free_port()? } else { 0 };
    let program = release.join(subject.package);
    let mut others = Ranks(vec![]);
    for rank in 1..subject.ranks {
        let mut command = Command::new(&program);
        command.args(subject.arguments).envs(rank_variables(rank, subject.ranks, port));
        // These ranks end with rank 0, and report a lost connection.
        command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
        let failed = |error| CountError::Start(subject.package, error);
        others.0.push(command.spawn().map_err(failed)?);
    }
    let mut command = Command::new("valgrind");
    command.args(["--tool=cachegrind", "--cache-sim=no", "--cachegrind-out-file=/dev/null"]);
    command.arg(program).args(subject.arguments);
    if subject.ranks > 1 {
        command.envs(rank_variables(0, subject.ranks, port));
    }
    // valgrind knows no AVX-512. One thread, because waiting threads count too.
    command.envs([
        ("RAYON_NUM_THREADS", "1"),
        ("STOKER_DEVICE", "cpu"),
        ("STOKER_KERNELS", "avx2"),
    ]);
    command.stdin(Stdio::piped()).stdout(Stdio::null()).stderr(Stdio::piped());
    let mut child = command.spawn().map_err(CountError::Valgrind)?;
    if let Some(mut stdin) = child.stdin.take() {
        // A program that has already ended shows its reason below.
        let _ = stdin.write_all(format!("{}\n", subject.line).repeat(lines).as_bytes());
    }
    let output = child.wait_with_output().map_err(CountError::Valgrind)?;
    let text = String::from_utf8_lossy(&output.stderr);
    let count = parse(&text).filter(|_| output.status.success());
    count.ok_or_else(|| CountError::NoCount(subject.name, text.into_owned()))
}

/// Processes of other ranks, killed on drop.
struct Ranks(Vec<Child>);

impl Drop for Ranks {
    fn drop(&mut self) {
        for rank in &mut self.0 {
            let _ = rank.kill();
            let _ = rank.wait();
        }
    }
}

/// Returns the variables of a rank on this machine.
fn rank_variables(rank: usize, size: usize, port: u16) -> [(&'static str, String); 8] {
    let (rank, size) = (rank.to_string(), size.to_string());
    [
        ("RANK", rank.clone()),
        ("WORLD_SIZE", size.clone()),
        ("LOCAL_RANK", rank),
        ("LOCAL_WORLD_SIZE", size),
        ("GROUP_RANK", "0".to_owned()),
        ("GROUP_WORLD_SIZE", "1".to_owned()),
        ("MASTER_ADDR", "127.0.0.1".to_owned()),
        ("MASTER_PORT", port.to_string()),
    ]
}

fn free_port() -> Result<u16, CountError> {
    let [port] = stoker_test_cluster::free_ports().map_err(CountError::Port)?;
    Ok(port)
}

/// Returns the number in a line such as `==7== I   refs:      1,234`.
fn parse(text: &str) -> Option<u64> {
    let line = text.lines().find(|line| line.contains("I ") && line.contains("refs:"))?;
    line.rsplit_once(':')?.1.trim().replace(',', "").parse().ok()
}

/// Builds both programs, and returns the directory with them.
fn build() -> Result<PathBuf, CountError> {
    let mut build = Command::new(env!("CARGO"));
    build.current_dir(repository()).args(["build", "--quiet", "--release"]);
    build.args(["--package", "stoker-benches", "--package", "stoker-search-benches"]);
    let status = build.status().map_err(|error| CountError::Start("cargo", error))?;
    let target = std::env::var_os("CARGO_TARGET_DIR").unwrap_or_else(|| "target".into());
    match status.success() {
        true => Ok(repository().join(target).join("release")),
        false => Err(CountError::Failed("the build of the benchmarks")),
    }
}

/// Returns the version of the compiler, such as `rustc 1.95.0`.
fn compiler() -> Result<String, CountError> {
    let output = Command::new("rustc").arg("--version").current_dir(repository()).output();
    let output = output.map_err(|error| CountError::Start("rustc", error))?;
    let text = String::from_utf8_lossy(&output.stdout);
    Ok(text.split_whitespace().take(2).collect::<Vec<_>>().join(" "))
}

fn read(path: &Path) -> Result<BTreeMap<String, Counts>, CountError> {
    let failed = |error| CountError::Record("read", error);
    match std::fs::read_to_string(path) {
        Ok(text) => serde_json::from_str(&text).map_err(|error| failed(error.into())),
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(BTreeMap::new()),
        Err(error) => Err(failed(error)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn count_is_read_from_the_output_of_valgrind() {
        let text = "==7== Cachegrind\n==7== \n==7== I   refs:      1,234,567\n";
        assert_eq!(parse(text), Some(1_234_567));
        assert_eq!(parse("==7== I refs: 12\n"), Some(12));
        assert_eq!(parse("valgrind: not found"), None);
    }

    #[test]
    fn changes_above_the_tolerance_are_reported() {
        let counts = |values: &[(&str, u64)]| -> Counts {
            values.iter().map(|(name, count)| ((*name).to_owned(), *count)).collect()
        };
        let recorded = counts(&[("a", 1000), ("b", 1000), ("c", 1000)]);
        let now = counts(&[("a", 1050), ("b", 949), ("c", 1051), ("new", 5)]);
        assert_eq!(compare(&recorded, &now), ["b", "c"]);
    }
}
