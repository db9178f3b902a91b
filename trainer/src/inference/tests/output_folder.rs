//! Tests of output directories: overlap with the input, and reuse after changes.

use stoker_api::inference::CheckpointChoice;

use super::*;

/// Returns the names of the files that were read.
fn inputs(job: &TestJob, at: &str) -> Vec<String> {
    let manifest: OutputManifest = read(&job.folder.path().join(at).join("manifest.json"));
    manifest.input.into_iter().map(|file| file.name).collect()
}

#[test]
fn output_below_the_input_is_excluded() {
    let text: String = (0..7).map(|i| row("x", i)).collect();
    let mut job = TestJob::new(&[("a.jsonl", &text)]);
    let output = job.folder.path().join("in/predictions/x");
    job.task.output.url = Some(output.display().to_string());
    // An interrupted run leaves parts in the directory; the next one must not read them.
    plan::plan(&job.context(0, 1, 0)).unwrap();
    work::work::<Echo>(&job.context(0, 1, 0)).unwrap();
    job.run().unwrap();
    assert_eq!(inputs(&job, "in/predictions/x"), ["a.jsonl"]);
    job.task.replace = true;
    let mut fresh = job.context(0, 1, 1);
    fresh.config.experiment_id = "another".into();
    plan::plan(&fresh).unwrap();
    work::work::<Echo>(&fresh).unwrap();
    finish::finish(&fresh).unwrap();
    assert_eq!(inputs(&job, "in/predictions/x"), ["a.jsonl"]);
}

#[test]
fn ambiguous_output_in_the_input_directory_is_refused() {
    let check = |pattern: &str, format: RowFormat, expected: Result<(), &str>| {
        let mut job = TestJob::new(&[("a.csv", "name,size\nx,1\n")]);
        job.task.input.url.push_str(pattern);
        job.task.output.url = Some(job.folder.path().join("in").display().to_string());
        job.task.output.format = format;
        match expected {
            Ok(()) => (0..2).for_each(|_| job.run().unwrap()),
            Err(expected) => check_error(job.run(), ExitCode::InvalidHyperparameters, expected),
        }
    };
    let (csv, json) = (RowFormat::Csv, RowFormat::JsonLines);
    check("", json, Err("manifest.json would be input and output"));
    check("/*.csv", csv, Err("part-00000-of-00001-0b3f9c1e-0.csv would be"));
    check("/*.csv", json, Ok(()));
    check("/a.csv", json, Ok(()));
}

#[test]
fn finished_output_of_changed_input_is_refused() {
    let text: String = (0..7).map(|i| row("x", i)).collect();
    let job = TestJob::new(&[("a.jsonl", &text)]);
    let again = || job.again();
    job.run().unwrap();
    again().unwrap();
    let refused = ExitCode::InvalidHyperparameters;
    let input = job.folder.path().join("in");
    std::fs::write(input.join("a.jsonl"), text.replace("6}", "9}")).unwrap();
    check_error(again(), refused, "its input a.jsonl has changed; start over with --fresh");
    std::fs::write(input.join("a.jsonl"), text.clone() + "\n").unwrap();
    check_error(again(), refused, "expected a.jsonl with");
    std::fs::write(input.join("a.jsonl"), &text).unwrap();
    std::fs::write(input.join("b.jsonl"), "").unwrap();
    check_error(again(), refused, "expected nothing, found b.jsonl with 0 bytes");
    std::fs::remove_file(input.join("b.jsonl")).unwrap();
    again().unwrap();
}

#[test]
fn finished_output_of_another_checkpoint_is_refused() {
    let mut job = TestJob::new(&[("a.jsonl", &row("x", 1))]);
    let folder = job.folder.path().join("weights");
    std::fs::create_dir(&folder).unwrap();
    let save = |batches: u64| {
        let manifest = json!({
            "format": 1, "experimentId": "id", "trial": 0, "attempt": 0, "batches": batches,
            "files": {},
        });
        std::fs::write(folder.join("manifest.json"), manifest.to_string()).unwrap();
    };
    save(4);
    let choice = Some(folder.display().to_string());
    job.task.checkpoint = Some(CheckpointChoice { folder: choice, ..Default::default() });
    job.run().unwrap();
    let again = || job.again();
    again().unwrap();
    save(5);
    check_error(again(), ExitCode::InvalidHyperparameters, "its checkpoint has changed");
}

/// Both may replace the output that they found first, but not the output of each other.
#[test]
fn second_of_two_concurrent_jobs_is_refused() {
    let job = TestJob::new(&[("a.jsonl", &row("x", 1))]);
    job.run().unwrap();
    let prepare = |id: &str| {
        let mut context = job.context(0, 1, 1);
        context.config.experiment_id = id.into();
        context.config.inference = Some(InferenceTask { replace: true, ..job.task.clone() });
        crate::inference::prepare(context, true).unwrap()
    };
    let jobs = ["first", "second"].map(prepare);
    jobs.iter().for_each(|context| work::work::<Echo>(context).unwrap());
    let [first, second] = &jobs;
    finish::finish(first).unwrap();
    let refused = finish::finish(second);
    check_error(refused, ExitCode::InvalidHyperparameters, "holds the output of job");
    assert_eq!(job.manifest().job_id, first.config.experiment_id);
}

/// Each `--fresh` is a new run, and the same command without it resumes the latest.
#[test]
fn fresh_run_is_resumed_without_the_option() {
    let job = TestJob::new(&[("a.jsonl", &row("x", 1))]);
    job.run().unwrap();
    let prepare = |id: &str, replace: bool| {
        let mut context = job.context(0, 1, 1);
        context.config.experiment_id = id.into();
        context.config.inference = Some(InferenceTask { replace, ..job.task.clone() });
        crate::inference::prepare(context, true)
    };
    let finish = |context: &Context| {
        work::work::<Echo>(context).unwrap();
        finish::finish(context).unwrap();
    };
    let id = |context: &Context| context.config.experiment_id.clone();
    // The process is killed after it has planned.
    let first = id(&prepare("0b3f9c1e-77aa", true).unwrap());
    assert_eq!(job.manifest().job_id, "0b3f9c1e-77aa");
    let resumed = prepare("0b3f9c1e-77aa", false).unwrap();
    assert_eq!(id(&resumed), first);
    finish(&resumed);
    assert_eq!(job.manifest().job_id, first);
    let again = prepare("0b3f9c1e-77aa", false).unwrap();
    assert_eq!(id(&again), first);
    finish(&again);
    let second = id(&prepare("0b3f9c1e-77aa", true).unwrap());
    assert_ne!(second, first);
    // Another job takes over the directory. The second run may not replace its output.
    finish(&prepare("another", true).unwrap());
    let resumed = prepare("0b3f9c1e-77aa", false).map(drop);
    check_error(resumed, ExitCode::InvalidHyperparameters, "holds the output of job");
}
