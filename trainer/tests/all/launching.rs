//! Tests of the launcher: environment, output, logs, signals and exit codes of ranks.

use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal};
use serde_json::json;

use crate::process::{Pod, is_alive, until};

const NUMBERS: &str =
    "echo $RANK $WORLD_SIZE $LOCAL_RANK $LOCAL_WORLD_SIZE $CROSS_RANK $CROSS_SIZE";

#[test]
fn output_of_one_rank_is_printed_and_stored() {
    let pod = Pod::new();
    let left = pod.launch_script(&format!("{NUMBERS}; echo wrong >&2; printf end"));
    assert_eq!((left.code, left.out.as_str()), (0, "0 1 0 1 0 1\nend\n"), "{left:?}");
    assert_eq!(left.errors, "wrong\n");
    let stored = pod.stored("logs/3/0-00000000.log");
    let mut lines: Vec<_> = stored.lines().collect();
    lines.sort_unstable();
    assert_eq!(lines, ["0 1 0 1 0 1", "end", "wrong"]);
    let termination = left.termination.unwrap();
    assert_eq!((termination.code, termination.message, termination.unsent), (0, None, vec![]));
    let record: serde_json::Value = serde_json::from_str(&pod.stored("record.json")).unwrap();
    assert_eq!(record["spec"]["hyperparameters"], pod.config["hyperparameters"]);
}

#[test]
fn ranks_of_a_pod_are_distinguished() {
    let pod = Pod::new().gang(4, 2).index(1);
    let left = pod.launch_script(NUMBERS);
    let mut lines: Vec<_> = left.out.lines().collect();
    lines.sort_unstable();
    assert_eq!(lines, ["[rank=2] 2 4 0 2 1 2", "[rank=3] 3 4 1 2 1 2"], "{left:?}");
    assert_eq!(pod.stored("logs/3/2-00000000.log"), "2 4 0 2 1 2\n");
    assert_eq!(pod.stored("logs/3/3-00000000.log"), "3 4 1 2 1 2\n");
    assert!(!pod.file("storage/trial/record.json").exists(), "rank 0's pod writes it");
}

#[test]
fn without_a_trial_there_is_one_rank() {
    let pod = Pod::new().without_trial();
    let role = "launch [\"sh\",\"-c\",\"echo $RANK of $WORLD_SIZE\"]";
    let left = pod.run(role);
    assert_eq!((left.code, left.out.as_str()), (0, "0 of 1\n"), "{left:?}");
}

/// With a second launcher, each rank would start all ranks of the pod.
#[test]
fn launcher_refuses_to_run_as_a_rank() {
    let pod = Pod::new();
    let left = pod.launch_script("echo launched=$STOKER_LAUNCHED");
    assert_eq!((left.code, left.out.as_str()), (0, "launched=1\n"), "{left:?}");
    let left = Pod::new().env("STOKER_LAUNCHED", "1").launch(&["sh", "-c", "echo started"]);
    assert_eq!((left.code, left.out.as_str()), (1, ""), "{left:?}");
    let message = left.termination.unwrap().message.unwrap();
    assert!(message.contains("to the program alone, without the launcher: sh -c"), "{message}");
}

/// Runs a script on two ranks of a pod and checks the launcher's exit code and message. The
/// launcher must end before it would kill ranks that ignore its signal, 30 s after the first exit.
fn check(script: &str, code: i32, message: Option<&str>) {
    let pod = Pod::new().gang(2, 2);
    let [both, started] = ["both", "started"].map(|name| pod.file(name));
    let begin = format!(
        ": >{started}$RANK; until [ -e {both} ]; do sleep 0.02; done",
        started = started.display(),
        both = both.display()
    );
    let child = pod.start_launch(&["sh", "-c", &format!("{begin}; {script}")]);
    until("both ranks", || [0, 1].iter().all(|rank| pod.file(&format!("started{rank}")).exists()));
    let start = Instant::now();
    std::fs::write(&both, "").unwrap();
    let left = pod.wait(child);
    assert_eq!(left.code, code, "{script}: {left:?}");
    let termination = left.termination.unwrap();
    assert_eq!(i32::from(termination.code), code, "{script}");
    assert_eq!(termination.message.as_deref(), message, "{script}");
    assert!(start.elapsed() < Duration::from_secs(25), "{script}");
}

#[test]
fn worst_rank_decides_code_and_message() {
    let on = |one: &str, other: &str| format!("if [ $RANK = 1 ]; then {one}; else {other}; fi");
    let long = "exec sleep 1000";
    check("exit 0", 0, None);
    check(&on("exit 79", "exit 0"), 79, Some("rank 1: exit code 79"));
    let lines = "rank 1: exit code 3; last lines: no such file\nin main.py";
    let fails = "echo shown; printf 'no such file\\nin main.py\\n' >&2; exit 3";
    check(&on(fails, long), 3, Some(lines));
    check(&on("exit 78", long), 78, Some("rank 1: exit code 78"));
    check(&on(long, "exit 80"), 80, Some("rank 0: exit code 80"));
    // The user error of rank 0 outweighs the peer failure of rank 1, which exits first.
    let folder = tempfile::tempdir().unwrap();
    let up = folder.path().join("up").display().to_string();
    let last = format!("until [ -e {up} ]; do sleep 0.02; done; exit 81");
    // Busy-wait without a child process: the shell would report that the signal terminated it.
    let first = format!("trap 'exit 1' TERM; : >{up}; while :; do :; done");
    check(&on(&last, &first), 1, Some("rank 0: exit code 1"));
    check(&on("exit 81", long), 81, Some("rank 1: exit code 81"));
    check(&on("kill -SEGV $$", long), 139, Some("rank 1: terminated by signal 11"));
    let words = r#"echo '{"code":1,"message":"out of memory"}' >$STOKER_TERMINATION_FILE; exit 1"#;
    check(&on(words, long), 1, Some("rank 1: out of memory"));
}

#[test]
fn unsent_reports_of_a_rank_are_forwarded() {
    let pod = Pod::new();
    let report = json!({
        "version": 1, "attempt": 3, "batches": 20,
        "event": {"validated": {"metrics": {"validation_loss": "0.5"}, "grantedUnits": 20}},
    });
    let words = json!({"code": 0, "unsent": [report]});
    let left = pod.launch_script(&format!("echo '{words}' >$STOKER_TERMINATION_FILE"));
    let unsent = left.termination.unwrap().unsent;
    assert_eq!(unsent.len(), 1);
    assert_eq!(serde_json::to_value(&unsent[0]).unwrap(), report);
}

#[test]
fn missing_program_is_named() {
    let pod = Pod::new();
    let plain = pod.file("plain");
    std::fs::write(&plain, "no program").unwrap();
    let check = |program: &str, expected: &str| {
        let left = pod.launch(&[program]);
        let message = left.termination.unwrap().message.unwrap();
        assert_eq!(left.code, 1, "{message}");
        assert!(message.contains(program) && message.contains(expected), "{message}");
        assert!(left.errors.contains(&message), "{}", left.errors);
    };
    check("no-such-program", "check that it is in the image");
    check(plain.to_str().unwrap(), "check that it is executable");
}

#[test]
fn signals_are_forwarded() {
    let check = |signal, name: &str| {
        let pod = Pod::new().gang(2, 2);
        let script = format!(
            "trap 'sleep 0.3; echo saved; exit 79' {name}; echo ready; while :; do sleep 0.05; done"
        );
        let child = pod.start_launch(&["sh", "-c", &script]);
        let ready = || std::fs::read_to_string(pod.file("out")).unwrap();
        until("both ranks", || ready().matches("ready").count() == 2);
        rustix::process::kill_process(Pid::from_child(&child), signal).unwrap();
        let left = pod.wait(child);
        assert_eq!(left.code, 79, "{name}: {left:?}");
        assert_eq!(left.out.matches("saved").count(), 2, "{name}: {left:?}");
    };
    check(Signal::TERM, "TERM");
    check(Signal::INT, "INT");
    check(Signal::HUP, "HUP");
}

/// `nohup` starts a program with SIGHUP ignored. A shell without job control starts a background
/// program with SIGINT ignored.
#[test]
fn inherited_ignored_signals_stay_ignored() {
    let mut pod = Pod::new();
    pod.env_options = vec!["--ignore-signal=HUP,INT"];
    let done = pod.file("done");
    let script = format!("echo ready; until [ -e {} ]; do sleep 0.02; done", done.display());
    let child = pod.start_launch(&["sh", "-c", &script]);
    until("the rank", || std::fs::read_to_string(pod.file("out")).unwrap().contains("ready"));
    let status = std::fs::read_to_string(format!("/proc/{}/status", child.id())).unwrap();
    let mask = status.lines().find_map(|line| line.strip_prefix("SigIgn:")).unwrap();
    assert_eq!(u64::from_str_radix(mask.trim(), 16).unwrap() & 3, 3, "{status}");
    for signal in [Signal::HUP, Signal::INT] {
        rustix::process::kill_process(Pid::from_child(&child), signal).unwrap();
    }
    std::fs::write(done, "").unwrap();
    assert_eq!(pod.wait(child).code, 0);
}

#[test]
fn descendants_do_not_outlive_the_launcher() {
    for how in ["sleep 1000 &", "setsid sleep 1000 &", "(trap '' TERM; exec sleep 1000) &"] {
        let pod = Pod::new();
        let left = pod.launch_script(&format!("{how} echo $!; sleep 0.1; exit 3"));
        assert_eq!(left.code, 3, "{left:?}");
        assert!(!is_alive(&left.out), "{how}: {left:?}");
    }
}

#[test]
fn descendants_may_save_after_a_signal() {
    let pod = Pod::new();
    let saves = "trap 'sleep 1; echo saved; exit 0' TERM; echo ready; while :; do sleep 0.05; done";
    // The signal terminates the outer shell, which has no handler, while the inner one saves.
    let child = pod.start_launch(&["sh", "-c", &format!("sh -c \"{saves}\"; true")]);
    until("the program", || std::fs::read_to_string(pod.file("out")).unwrap().contains("ready"));
    rustix::process::kill_process(Pid::from_child(&child), Signal::TERM).unwrap();
    let left = pod.wait(child);
    assert_eq!(left.code, 143, "{left:?}");
    assert!(left.out.contains("saved"), "{left:?}");
    assert!(pod.stored("logs/3/0-00000000.log").contains("saved"));
}

#[test]
fn unusable_storage_is_detected_before_the_start() {
    let mut pod = Pod::new();
    std::fs::write(pod.file("storage"), "a file").unwrap();
    let left = pod.launch_script("echo started");
    assert_eq!((left.code, left.out.as_str()), (80, ""), "{left:?}");
    assert!(left.termination.unwrap().message.unwrap().contains("storage"));
    pod.config["storage"]["url"] = json!("ftp://x");
    assert_eq!(pod.launch_script("echo started").code, 80);
}

#[test]
fn unstorable_logs_do_not_end_the_program() {
    let pod = Pod::new();
    let folder = pod.file("storage/trial");
    std::fs::create_dir_all(&folder).unwrap();
    std::fs::write(folder.join("logs"), "where the directory should be").unwrap();
    let left = pod.launch_script("echo started; exit 0");
    assert_eq!((left.code, left.out.as_str()), (0, "started\n"), "{left:?}");
    assert!(left.errors.contains("cannot store the end of the log"), "{left:?}");
}

#[test]
fn unstorable_log_does_not_lose_others() {
    let pod = Pod::new().gang(4, 2).index(1);
    // A directory at the path of the first object of rank 2.
    std::fs::create_dir_all(pod.file("storage/trial/logs/3/2-00000000.log")).unwrap();
    let left = pod.launch_script("echo $RANK");
    assert_eq!(left.code, 0, "{left:?}");
    assert!(left.errors.contains("cannot store the end of the log"), "{left:?}");
    assert_eq!(pod.stored("logs/3/3-00000000.log"), "3\n");
}

#[test]
fn incomplete_line_is_shown_while_the_program_runs() {
    let pod = Pod::new();
    let done = pod.file("done");
    let script = format!("printf loading; until [ -e {} ]; do sleep 0.02; done", done.display());
    let child = pod.start_launch(&["sh", "-c", &script]);
    let printed = || std::fs::read_to_string(pod.file("out")).unwrap();
    until("the incomplete line", || printed().contains("loading\n"));
    std::fs::write(done, "").unwrap();
    assert_eq!(pod.wait(child).code, 0);
    assert_eq!(pod.stored("logs/3/0-00000000.log"), "loading\n");
}
