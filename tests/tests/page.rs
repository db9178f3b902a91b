//! The web page of real runs, in a real browser.

use std::io::{BufRead as _, BufReader, Write as _};
use std::path::{Path, PathBuf};
use std::process::{Output, Stdio};

use serde_json::{Value, json};
use stoker_test_cluster::wait_until;
use stoker_tests::{cache, describe_output, has_data, program, repository, stoker};
use tempfile::TempDir;

use crate::browser::{Browser, Process, Tools};
use crate::local_run::{last_line, run};

/// Texts that a careless page would run, or that would hide other text.
const HOSTILE: [&str; 4] = [
    "<img src=x onerror=\"window.hacked='image'\"><b class=hostile>bold</b>",
    "\"'><script>window.hacked='script';alert(1)</script>",
    "left \u{202e}right\u{2066}",
    "javascript:window.hacked='link'",
];

/// Returns `None` if a program or the data set is missing: the calling test is then skipped.
#[track_caller]
fn tools() -> Option<Tools> {
    if !has_data("iris") {
        return None;
    }
    program("stoker-trainer");
    Tools::find()
}

/// `stoker ui` with the URL that it printed.
struct Server {
    _process: Process,
    url: String,
}

impl Server {
    fn start(root: &Path, port: &str, more: &[&str]) -> Self {
        let mut process = stoker(["ui", "--output", "json", "--port", port, "--root"])
            .arg(root)
            .args(more)
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let mut line = String::new();
        BufReader::new(process.stdout.take().unwrap()).read_line(&mut line).unwrap();
        let process = Process(process);
        let line: Value = serde_json::from_str(&line).unwrap_or_else(|error| {
            panic!("{error}: `stoker ui` printed {line:?}");
        });
        Self { _process: process, url: line["url"].as_str().unwrap().to_owned() }
    }

    fn port(&self) -> String {
        let rest = self.url.strip_prefix("http://127.0.0.1:").unwrap();
        rest.split('/').next().unwrap().to_owned()
    }
}

/// Runs with their page, and the only browser.
struct Page {
    tools: Tools,
    /// A search that still runs. It ends before its directory is removed.
    search: Option<Process>,
    root: TempDir,
    input: Value,
    browser: Option<Browser>,
}

impl Page {
    /// Returns the page of a finished search and of a second, shorter one.
    #[track_caller]
    fn of_finished_search() -> Option<Self> {
        let mut page = Self::new(tools()?);
        page.train("asha.yaml", &["--set", "minValidationPeriod={epochs: 1}"]);
        let sets = ["metric=validation_loss", "smallerIsBetter=true", "maxLength.epochs=4"];
        let sets = sets.map(|set| format!("searcher.{set}"));
        let sets: Vec<&str> = sets.iter().flat_map(|set| ["--set", set]).collect();
        page.train("grid.yaml", &sets);
        let id = page.id("iris-asha");
        let trials = page.root.path().join("default").join(&id).join("trials");
        // A promoted trial mostly has two attempts and two checkpoints.
        let size = |trial: &String| {
            let folder = trials.join(trial);
            (names(&folder.join("checkpoints")).len(), names(&folder.join("logs")).len())
        };
        let best = names(&trials).into_iter().max_by_key(size).unwrap();
        let checkpoint = names(&trials.join(&best).join("checkpoints")).pop();
        page.input = json!({
            "id": id,
            "other": page.id("iris-grid"),
            "trial": best.parse::<u32>().unwrap(),
            "checkpoint": checkpoint,
        });
        Some(page)
    }

    fn new(tools: Tools) -> Self {
        let root = tempfile::tempdir().unwrap();
        Self { tools, search: None, root, input: json!({}), browser: None }
    }

    /// Runs an example of iris to its end.
    fn train(&self, file: &str, more: &[&str]) {
        let output = self.run(file, more);
        assert!(output.status.success(), "{}", describe_output(&output));
    }

    fn run(&self, file: &str, more: &[&str]) -> Output {
        run(&repository().join("examples/iris").join(file), self.root.path(), more)
    }

    /// Returns the permanent name of the experiment.
    fn id(&self, name: &str) -> String {
        let is_id = |id: &String| {
            id.strip_prefix(name).and_then(|rest| rest.strip_prefix('-')).is_some_and(|uid| {
                uid.len() == 8 && uid.chars().all(|char| char.is_ascii_hexdigit())
            })
        };
        let found = names(&self.root.path().join("local")).into_iter().find(is_id);
        found.unwrap_or_else(|| panic!("no record of {name}"))
    }

    fn record(&self, id: &str) -> PathBuf {
        self.root.path().join("local").join(id).join("record/trials")
    }

    /// Runs a script in `tests/browser`, and executes the commands that it prints.
    fn check(self, script: &str) {
        self.check_with(script, &[]);
    }

    /// Same as [`check`](Self::check), with more options of `stoker ui`.
    fn check_with(self, script: &str, more: &[&str]) {
        self.check_and(script, more, |_| panic!("the script printed `run`"));
    }

    /// Same as [`check_with`](Self::check_with). The command `run` calls `act`.
    fn check_and(mut self, script: &str, more: &[&str], act: impl Fn(&Self)) {
        let server = Server::start(self.root.path(), "0", more);
        let port = server.port();
        self.input["url"] = server.url.as_str().into();
        self.input["root"] = self.root.path().to_str().into();
        let mut server = Some(server);
        let browser = self.browser.take().unwrap_or_else(Browser::wait);
        let page = &self;
        page.tools.run(&browser, script, &page.input, |command| match command {
            "stop" => {
                server = None;
                "stopped".to_owned()
            }
            "start" => server.insert(Server::start(page.root.path(), &port, more)).url.clone(),
            "run" => {
                act(page);
                "ended".to_owned()
            }
            other => panic!("the script printed {other:?}"),
        });
    }
}

/// Returns the sorted names in a directory.
fn names(folder: &Path) -> Vec<String> {
    let entries = std::fs::read_dir(folder).unwrap_or_else(|error| {
        panic!("{}: {error}", folder.display());
    });
    let name = |entry: std::io::Result<std::fs::DirEntry>| {
        entry.unwrap().file_name().into_string().unwrap()
    };
    let mut names: Vec<String> = entries.map(name).collect();
    names.sort();
    names
}

#[test]
fn page_draws_every_view() {
    if let Some(page) = Page::of_finished_search() {
        page.check("views.mjs");
    }
}

#[test]
fn page_has_no_serious_accessibility_fault() {
    if let Some(page) = Page::of_finished_search() {
        page.check("axe.mjs");
    }
}

#[test]
fn page_keeps_selection_and_brush() {
    if let Some(page) = Page::of_finished_search() {
        page.check("selection.mjs");
    }
}

#[test]
fn page_works_with_the_keyboard() {
    if let Some(page) = Page::of_finished_search() {
        page.check("keyboard.mjs");
    }
}

#[test]
fn page_works_on_touch_screens() {
    if let Some(page) = Page::of_finished_search() {
        page.check("touch.mjs");
    }
}

#[test]
fn page_exports_equal_the_record() {
    if let Some(page) = Page::of_finished_search() {
        page.check("exports.mjs");
    }
}

#[test]
fn page_refuses_strangers() {
    if let Some(page) = Page::of_finished_search() {
        page.check("access.mjs");
    }
}

#[test]
fn page_works_without_javascript() {
    let Some(mut page) = Page::of_finished_search() else { return };
    // A table of two pages. Its trials are copies, because training them would take long.
    page.train("random.yaml", &["--set", "searcher.maxLength.epochs=1"]);
    let long = page.id("iris-random");
    let folder = page.record(&long);
    let text = std::fs::read_to_string(folder.join("0.json")).unwrap();
    for index in 8..130 {
        let mut trial: Value = serde_json::from_str(&text).unwrap();
        trial["metadata"]["name"] = format!("iris-random-{index}").into();
        trial["spec"]["index"] = index.into();
        std::fs::write(folder.join(format!("{index}.json")), trial.to_string()).unwrap();
    }
    page.input["long"] = long.into();
    page.check("noscript.mjs");
}

#[test]
fn page_shows_hostile_text_as_text() {
    let Some(tools) = tools() else { return };
    let mut page = Page::new(tools);
    let long = "\u{2066}<i>".repeat(2500);
    let mut values = HOSTILE.to_vec();
    values.push(&long);
    let program = "printf '%s\\n' \"$@\" >&2; exec stoker-trainer iris";
    let mut command = vec!["sh", "-c", program, "sh"];
    command.extend(&values);
    let experiment = json!({
        "apiVersion": "stoker.dev/v1alpha1",
        "kind": "Experiment",
        "metadata": {"name": "hostile"},
        "spec": {
            "description": HOSTILE[0],
            "labels": HOSTILE,
            "entrypoint": {"command": command},
            "hyperparameters": {
                "learning_rate": {"log": {"min": -3, "max": -1}},
                "hidden": 8,
                "global_batch_size": 16,
                "<img src=x onerror=\"window.hacked='name'\">": {"categorical": values},
            },
            "searcher": {
                "metric": "validation_loss",
                "maxLength": {"epochs": 4},
                "random": {"maxTrials": 6},
            },
            "minValidationPeriod": {"epochs": 1},
            "reproducibility": {"experimentSeed": 1},
        },
    });
    let file = page.root.path().join("hostile.yaml");
    std::fs::write(&file, experiment.to_string()).unwrap();
    let output = run(&file, page.root.path(), &[]);
    assert!(output.status.success(), "{}", describe_output(&output));
    let id = page.id("hostile");
    add_metrics(&page.root.path().join("default").join(&id).join("trials/0/metrics"), &values);
    page.input = json!({"id": id, "texts": HOSTILE});
    page.check("hostile.mjs");
}

/// Adds rows with hostile names to the metrics of a trial.
fn add_metrics(folder: &Path, names_of_metrics: &[&str]) {
    let path = folder.join(names(folder).first().unwrap());
    let mut file = std::fs::File::options().append(true).open(path).unwrap();
    for name in names_of_metrics {
        for (batches, epoch) in [(8, 1), (16, 2), (32, 4)] {
            let row = json!({
                "group": "validation", "batches": batches, "epoch": epoch, "attempt": 0,
                "time": 1_795_525_455.5 + f64::from(batches), "metrics": {*name: batches},
            });
            writeln!(file, "{row}").unwrap();
        }
    }
}

#[test]
fn page_shows_the_first_experiment() {
    let Some(tools) = tools() else { return };
    let root = tempfile::tempdir().unwrap();
    let server = Server::start(root.path(), "0", &[]);
    let input = json!({ "url": server.url });
    tools.run(&Browser::wait(), "first.mjs", &input, |command| {
        assert_eq!(command, "start");
        let file = repository().join("examples/iris/const.yaml");
        let output = run(&file, root.path(), &["--set", "searcher.maxLength={epochs: 1}"]);
        assert!(output.status.success(), "{}", describe_output(&output));
        "ended".to_owned()
    });
}

/// Returns the page of a search that trains one short trial after the other, for as long as the
/// browser needs.
fn of_running_search(tools: Tools) -> Page {
    add_running_search(Page::new(tools))
}

fn add_running_search(mut page: Page) -> Page {
    page.browser = Some(Browser::wait());
    let sets = ["searcher.maxLength.epochs=300", "searcher.random.maxTrials=5000"];
    let sets = sets.into_iter().chain(["searcher.random.maxConcurrentTrials=1"]);
    let process = stoker(["run", "--output", "json", "--root"])
        .arg(page.root.path())
        .arg(repository().join("examples/iris/random.yaml"))
        .args(sets.flat_map(|set| ["--set", set]))
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .spawn()
        .unwrap();
    page.search = Some(Process(process));
    let local = page.root.path().join("local");
    let has_trial = || {
        let ids = std::fs::read_dir(&local).into_iter().flatten().flatten();
        let mut trials = ids.map(|id| id.path().join("record/trials/1.json"));
        trials.any(|path| path.exists()).then_some(()).ok_or_else(|| "no trial 1".to_owned())
    };
    wait_until("the second trial starts", has_trial).unwrap_or_else(|error| panic!("{error}"));
    page.input["id"] = page.id("iris-random").into();
    page
}

#[test]
fn page_draws_every_view_of_a_running_search() {
    if let Some(tools) = tools() {
        of_running_search(tools).check("running.mjs");
    }
}

#[test]
fn page_follows_a_running_search() {
    if let Some(tools) = tools() {
        of_running_search(tools).check("live.mjs");
    }
}

#[test]
fn page_repeats_loads_that_fail() {
    if let Some(page) = Page::of_finished_search() {
        page.check("retries.mjs");
    }
}

#[test]
fn page_steers_a_local_run() {
    if let Some(tools) = tools() {
        of_running_search(tools).check_with("actions.mjs", &["--allow-actions"]);
    }
}

#[test]
fn page_kills_and_continues_local_runs() {
    let Some(tools) = tools() else { return };
    let mut page = Page::new(tools);
    // Without its data, the experiment fails.
    let data = page.root.path().join("data-of-iris");
    let root = format!("data.root={}", data.display());
    let sets = [&root, "maxRestarts=0", "searcher.maxLength={epochs: 1}"];
    let options: Vec<&str> = sets.iter().flat_map(|set| ["--set", set]).collect();
    let output = page.run("const.yaml", &options);
    assert_eq!(last_line(&output)["phase"], "Failed", "{}", describe_output(&output));
    page.input["failed"] = page.id("iris").into();
    add_running_search(page).check_and("reopen.mjs", &["--allow-actions"], |page| {
        std::os::unix::fs::symlink(cache().join("data/iris"), &data).unwrap();
        page.train("const.yaml", &options);
    });
}
