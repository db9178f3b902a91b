//! Prints what every thread of this process is doing, on SIGUSR1.

use std::path::Path;
use std::sync::{Arc, OnceLock};

use tokio::signal::unix::{SignalKind, signal};

use crate::collective::ProgressState;

/// On each SIGUSR1, prints the position of the loop and the state of every thread to standard
/// error.
///
/// # Errors
///
/// Fails if the signal handler cannot be installed.
pub(crate) fn listen(
    rt: &tokio::runtime::Handle,
    rank: usize,
    progress: Arc<OnceLock<Arc<ProgressState>>>,
) -> std::io::Result<()> {
    let _guard = rt.enter();
    let mut requests = signal(SignalKind::user_defined1())?;
    rt.spawn(async move {
        while requests.recv().await.is_some() {
            eprint!("{}", describe_process(rank, progress.get().map(|progress| &**progress)));
        }
    });
    Ok(())
}

/// Returns a line for the loop and one for each thread. `progress` is `None` until the ranks are
/// connected.
fn describe_process(rank: usize, progress: Option<&ProgressState>) -> String {
    let median = progress.map(ProgressState::median_step).unwrap_or_default();
    let steps = match median.is_zero() {
        true => String::new(),
        false => format!("; steps take {:.3} s", median.as_secs_f64()),
    };
    let waits = || "waiting for the other ranks".into();
    let (process, position) =
        (std::process::id(), progress.map_or_else(waits, ProgressState::position));
    let mut text = format!("stoker: rank {rank}, process {process}, is {position}{steps}\n");
    let tasks = Path::new("/proc/self/task");
    let threads = std::fs::read_dir(tasks).into_iter().flatten().flatten();
    let mut ids: Vec<u64> =
        threads.filter_map(|entry| entry.file_name().to_str()?.parse().ok()).collect();
    ids.sort_unstable();
    for id in ids {
        let read = |file: &str| {
            std::fs::read_to_string(tasks.join(id.to_string()).join(file)).unwrap_or_default()
        };
        // The thread may have ended in between.
        if let Some(line) = describe_thread(id, &read("stat"), &read("wchan"), &read("syscall")) {
            text += &format!("stoker:   {line}\n");
        }
    }
    text
}

/// Describes a thread from its `stat`, `wchan` and `syscall` files in `/proc`.
fn describe_thread(id: u64, stat: &str, waits_in: &str, syscall: &str) -> Option<String> {
    let (front, rest) = stat.rsplit_once(") ")?;
    let name = front.split_once('(')?.1;
    let fields: Vec<&str> = rest.split_whitespace().collect();
    let ticks = |at: usize| fields.get(at)?.parse::<u64>().ok();
    let seconds = (ticks(11)? + ticks(12)?) as f64 / 100.0;
    let state = match *fields.first()? {
        "R" => "runs",
        "S" => "waits",
        "D" => "waits for a disk or a device",
        "T" | "t" => "is stopped",
        "Z" | "X" => "has ended",
        _ => "is idle",
    };
    let position = match (waits_in.trim(), syscall.split_whitespace().next()) {
        ("" | "0", Some(number)) if number.parse::<u64>().is_ok() => {
            format!(" in system call {number}")
        }
        ("" | "0", _) => String::new(),
        (position, _) => format!(" in {position}"),
    };
    Some(format!("thread {id} {name} {state}{position}, {seconds:.2} s of CPU"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn threads_are_described_from_proc() {
        let stat = |state| format!("7 (a (b) c) {state} 1 2 3 4 5 6 7 8 9 10 250 50 0 0 20 0");
        let check = |stat: &str, waits_in, syscall, expected| {
            assert_eq!(describe_thread(7, stat, waits_in, syscall).as_deref(), expected);
        };
        check(&stat("R"), "0", "running", Some("thread 7 a (b) c runs, 3.00 s of CPU"));
        let waits = Some("thread 7 a (b) c waits in futex_wait_queue, 3.00 s of CPU");
        check(&stat("S"), "futex_wait_queue", "202 0x1", waits);
        let waits = Some("thread 7 a (b) c waits in system call 202, 3.00 s of CPU");
        check(&stat("S"), "0", "202 0x1", waits);
        check("", "0", "", None);
    }

    #[test]
    fn all_threads_of_this_process_are_described() {
        let (sender, receiver) = std::sync::mpsc::channel::<()>();
        let thread = std::thread::Builder::new().name("waits-here".into());
        let thread = thread.spawn(move || receiver.recv().is_err()).unwrap();
        let progress = ProgressState::default();
        progress.begin_step(41);
        let mut text = String::new();
        // A new thread runs at first, under its parent's name.
        for _ in 0..6_000 {
            text = describe_process(3, Some(&progress));
            if text.contains(" waits-here waits") {
                break;
            }
            std::thread::sleep(std::time::Duration::from_millis(10));
        }
        assert!(text.starts_with("stoker: rank 3, process "), "{text}");
        assert!(text.contains(" is at step 41 "), "{text}");
        assert!(text.lines().any(|line| line.contains(" waits-here waits")), "{text}");
        drop(sender);
        assert!(thread.join().unwrap());
    }
}
