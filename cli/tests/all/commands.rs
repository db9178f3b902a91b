//! Tests of the commands on local runs: lists, names, logs, checkpoints and errors.

use serde_json::{Value, json};

use crate::fixture::{Lines, RunFixture, check, random, stoker};

/// Returns a fixture after a run with three trials. Trial 0 has the greatest and trial 2 the
/// smallest `x`.
fn completed() -> RunFixture {
    let mut fixture = RunFixture::new(random(3), "");
    fixture.labels = json!({"team": "a"});
    fixture.spec["hyperparameters"]["net"] = json!({"width": {"const": 8}});
    check(&fixture.run(&["--slots", "3"]), 0, "");
    fixture
}

/// Returns the first words of the lines after the header.
fn first_words(text: &str) -> Vec<&str> {
    text.lines().skip(1).filter_map(|line| line.split_whitespace().next()).collect()
}

fn values(list: &Value, path: &str) -> Vec<f64> {
    list.as_array()
        .unwrap()
        .iter()
        .map(|item| item.pointer(path).unwrap().as_f64().unwrap())
        .collect()
}

#[test]
fn local_lists_are_sorted_and_filtered() {
    let fixture = completed();
    let text = fixture.check("trial list scripted", 0, "NET.WIDTH");
    assert_eq!(first_words(&text), ["scripted-0", "scripted-1", "scripted-2"]);
    // The last column is the age.
    assert!(text.lines().all(|line| line.split_whitespace().last() != Some("-")), "{text}");
    let sorted = values(
        &fixture.json("trial list scripted --sort-by -hparams.x"),
        "/spec/hyperparameters/x",
    );
    assert!(sorted.is_sorted_by(|a, b| a > b), "{sorted:?}");
    let best = values(&fixture.json("trial list scripted --top 2"), "/status/bestMetric");
    let all = values(&fixture.json("trial list scripted --sort-by loss"), "/status/bestMetric");
    assert_eq!((best.len(), &best[..]), (2, &all[..2]));
    let none = fixture.check("trial list scripted --phase failed,running", 0, "hidden by --phase");
    assert_eq!(none, "");
    let names = fixture.check("trial list scripted -o name --reverse", 0, "");
    assert_eq!(names.lines().next(), Some("trial.stoker.dev/scripted-2"));
    fixture.check("trial list scripted --sort-by color", 2, "cannot sort with --sort-by color");
    fixture.check("trial list scripted --phase done", 2, "possible values: Pending");
}

#[test]
fn local_experiments_have_the_labels_of_the_file() {
    let fixture = completed();
    let names =
        |selector: &str| fixture.check(&format!("experiment list -o name -l {selector}"), 0, "");
    assert_eq!(names("team=a"), "experiment.stoker.dev/scripted\n");
    assert_eq!(names("team!=a"), "");
    let trials = "trial list scripted -l stoker.dev/experiment=scripted -o name";
    assert_eq!(fixture.check(trials, 0, "").lines().count(), 3);
}

#[test]
fn older_runs_are_named_by_their_id() {
    let fixture = completed();
    check(&fixture.run(&["--fresh"]), 0, "");
    let text = fixture.check("experiment list --sort-by name", 0, "");
    let names = first_words(&text);
    assert_eq!((names.len(), names[0]), (2, "scripted"));
    let older = names[1].strip_prefix("scripted-").unwrap();
    assert_eq!(older.len(), 8);
    fixture.check(&format!("trial describe scripted-{older}-0"), 0, "completed all 10 batches");
    fixture.check("trial describe scripted-00000000-0", 2, "no run of `scripted-00000000`");
    let listed = fixture.check(&format!("trial list {}", names[1]), 0, "");
    assert_eq!(first_words(&listed)[0], format!("{}-0", names[1]));
}

#[test]
fn objects_are_printed_as_yaml() {
    let fixture = completed();
    let text = fixture.check("experiment describe scripted -o yaml", 0, "kind: Experiment");
    assert!(text.contains("phase: Completed"), "{text}");
    let two = fixture.check("trial describe scripted 0 1 -o yaml", 0, "");
    assert_eq!(two.lines().filter(|line| *line == "---").count(), 1, "{two}");
    fixture.check("trial list scripted -o yaml", 0, "- apiVersion: stoker.dev/v1alpha1");
}

#[test]
fn trials_have_the_same_names_in_all_commands() {
    let fixture = completed();
    for name in ["scripted-1", "scripted 1", "scripted/1", "trial.stoker.dev/scripted-1"] {
        assert_eq!(fixture.json(&format!("trial describe {name}"))["spec"]["index"], 1, "{name}");
        fixture.check(&format!("trial logs {name}"), 0, "trial 1 attempt 0 trains");
    }
    let expected = "`scripted` is not a trial name; write EXPERIMENT-INDEX, such as scripted-0";
    for command in ["trial describe", "trial logs", "trial metrics"] {
        fixture.check(&format!("{command} scripted"), 2, expected);
        fixture.check(&format!("{command} scripted-7"), 2, "trial `scripted-7` not found");
    }
}

#[test]
fn listed_names_are_accepted_by_exports() {
    let fixture = completed();
    let expected = "trial `scripted-7` not found";
    let mlflow = "mlflow trial.stoker.dev/scripted-7 --tracking-uri http://127.0.0.1:1";
    fixture.check(mlflow, 2, expected);
    fixture.check("tensorboard trial.stoker.dev/scripted-7", 2, expected);
}

#[test]
fn tensorboard_needs_a_free_port() {
    let fixture = completed();
    let other = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let port = other.local_addr().unwrap().port();
    let command = format!("tensorboard scripted --program sleep --port {port}");
    let text = fixture.check(&command, 1, &format!("cannot use port {port} on 127.0.0.1"));
    assert_eq!(text, "", "the address of another server");
}

#[test]
fn several_local_trials_are_shown() {
    let fixture = completed();
    let output = fixture.stoker("trial describe scripted 0 7 2 -o json").output().unwrap();
    assert_eq!(output.status.code(), Some(2));
    let text = String::from_utf8(output.stdout).unwrap();
    let shown: Vec<Value> = text.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    let names: Vec<&str> =
        shown.iter().map(|trial| trial["metadata"]["name"].as_str().unwrap()).collect();
    assert_eq!(names, ["scripted-0", "scripted-2"]);
    let error: Value = serde_json::from_slice(&output.stderr).unwrap();
    assert_eq!(error["error"]["name"], "scripted-7");
    assert_eq!(error["error"]["exitCode"], 2);
}

#[test]
fn local_logs_are_cut_and_timed() {
    let fixture = completed();
    let all = fixture.check("trial logs scripted-0", 0, "trial 0 attempt 0 trains");
    let last = fixture.check("trial logs scripted-0 --tail 1", 0, "");
    assert_eq!(all.lines().last(), last.lines().last());
    assert_eq!(last.lines().count(), 1);
    assert_eq!(fixture.check("trial logs scripted-0 --tail 0", 0, ""), "");
    fixture.check("trial logs scripted-0 --timestamps --tail 1", 0, "[stored=20");
    assert_eq!(fixture.check("trial logs scripted-0 --since 2999-01-01T00:00:00Z", 0, ""), "");
    assert_eq!(fixture.check("trial logs scripted-0 --since 1h", 0, ""), all);
    fixture.check("trial logs scripted-0 --since today", 2, "write a duration such as 90s");
    fixture.check("trial logs scripted-0 --rank 1", 2, "it has 1 rank, 0");
    let both = fixture.check("experiment logs scripted --tail 1", 0, "");
    let prefixes: Vec<&str> = both.lines().map(|line| &line[..9]).collect();
    assert_eq!(prefixes, ["[trial=0]", "[trial=1]", "[trial=2]"]);
    let line = fixture.check("trial logs scripted-0 --tail 1 --output json", 0, "");
    let line: Value = serde_json::from_str(&line).unwrap();
    assert_eq!((&line["time"], &line["rank"]), (&Value::Null, &json!(0)));
    assert!(line["storedAt"].is_string(), "{line}");
}

#[test]
fn local_checkpoints_are_downloaded_by_name() {
    let fixture = completed();
    fixture.complete_checkpoints();
    let names = fixture.check("checkpoint list scripted/1 -o name", 0, "");
    let name = names.lines().next().unwrap();
    assert!(name.starts_with("scripted-1/"), "{names}");
    let target = |name: &str| fixture.folder.path().join(name);
    let download = |name: &str, to: &str, more: &str| {
        format!("checkpoint download {name} --to {} {more}", target(to).display())
    };
    fixture.check(&download(name, "named", ""), 0, "of trial scripted-1");
    assert!(target("named/manifest.json").exists());
    fixture.check(&download("scripted", "best", ""), 0, "of trial scripted-");
    fixture.check(&download(name, "both", "--latest"), 2, "remove --checkpoint");
    fixture.check(&download("scripted-1/1-0", "none", ""), 2, "checkpoint `1-0` of trial");
    fixture.check("checkpoint download scripted", 2, "--to <DIR>");
}

#[test]
fn numbers_of_checkpoints_are_numbers() {
    let fixture = completed();
    let listed = fixture.json("checkpoint list scripted --top 1");
    assert!(listed[0]["metric"].is_f64(), "{listed}");
    let best = fixture.json("experiment describe scripted")["status"]["best"]["metric"].clone();
    assert_eq!(listed[0]["metric"], best);
}

#[test]
fn watched_rows_are_printed_when_they_change() {
    let fixture = RunFixture::new(random(1), "").pause_at(3);
    let run = fixture.start();
    fixture.wait_for_batch(3);
    let mut lines = Lines::start(&mut fixture.stoker("experiment list --watch"));
    assert!(lines.next().unwrap().starts_with("NAME"));
    assert!(lines.next().unwrap().starts_with("scripted"));
    fixture.release();
    let completed = lines.find(|line| line.contains("Completed")).unwrap();
    assert!(completed.starts_with("scripted"), "{completed}");
    assert!(run.wait_with_output().unwrap().status.success());
}

#[test]
fn errors_are_json_with_output_json() {
    let fixture = RunFixture::new(json!({"random": {"maxTrials": 0}}), "");
    let file = fixture.folder.path().join("experiment.yaml");
    let _ = fixture.command(&[]);
    let file = file.display();
    let check = |arguments: &str, kind: &str, code: i32, contains: &str| {
        let mut command = stoker();
        command.args(arguments.split_whitespace()).args(["--output", "json"]);
        command.current_dir(fixture.folder.path());
        let output = command.output().unwrap();
        let stderr = String::from_utf8(output.stderr).unwrap();
        assert_eq!(output.status.code(), Some(code), "{arguments}: {stderr}");
        let value: Value = serde_json::from_str(stderr.lines().last().unwrap()).unwrap();
        let error = &value["error"];
        assert_eq!((&error["kind"], &error["exitCode"]), (&json!(kind), &json!(code)), "{value}");
        assert!(error["message"].as_str().unwrap().contains(contains), "{arguments}: {value}");
        value
    };
    check("trial lst", "usage", 2, "'lst'; tip: a similar subcommand");
    check("trial list", "usage", 2, "required arguments were not provided: <EXPERIMENT>");
    let error = check("trial list m --top x", "usage", 2, "invalid value 'x' for '--top <N>'");
    assert_eq!(error["error"]["argument"], "--top <N>");
    check("trial list m --root .", "input", 2, "no run of `m`");
    check("trial describe m --root .", "input", 2, "is not a trial name");
    check("experiment list --kubeconfig missing", "input", 2, "missing");
    let error = check(&format!("run {file}"), "file", 2, "maxTrials");
    assert_eq!(error["error"]["errors"][0]["field"], "spec.searcher.random.maxTrials");
}

#[test]
fn full_disk_for_the_output_is_an_error() {
    let fixture = completed();
    for arguments in
        ["trial list scripted", "trial logs scripted-0", "experiment metrics scripted -o csv"]
    {
        let full = std::fs::File::options().write(true).open("/dev/full").unwrap();
        let output = fixture.stoker(arguments).stdout(full).output().unwrap();
        check(&output, 1, "cannot write to standard output: No space left on device");
    }
}
