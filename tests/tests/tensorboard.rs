//! TensorBoard reads the event files of trials.

use std::process::Command;

use stoker_tests::{describe_output, has_data, repository};

use crate::local_run::run;
use crate::readers::{glob_trials, tool};

/// Compares the TensorBoard events of a trial with its metric rows, read by pandas.
const READ: &str = r#"
import glob, sys
import pandas
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
trial = sys.argv[1]
events = EventAccumulator(trial + "/tensorboard")
events.Reload()
tags = sorted(events.Tags()["scalars"])
paths = sorted(glob.glob(trial + "/metrics/*.jsonl"))
rows = pandas.concat(pandas.read_json(path, lines=True) for path in paths)
training = rows[rows["group"] == "training"]
tag = [tag for tag in tags if tag.startswith("training") and tag.endswith("loss")][0]
series = events.Scalars(tag)
last = training.sort_values("batches").iloc[-1]
assert series[-1].step == last["batches"], (series[-1], last)
tolerance = 1e-6 * max(1, abs(series[-1].value))
assert abs(series[-1].value - last["metrics"]["loss"]) < tolerance, (series[-1], last)
assert len(series) == len(training), (len(series), len(training))
assert any(tag.startswith("validation") for tag in tags), tags
count = events.Scalars("model/num_parameters")
assert len(count) == 1 and count[0].value > 10, count
histograms = set(events.Tags()["histograms"])
assert histograms == {"hidden.bias", "hidden.weight", "output.bias", "output.weight"}, histograms
for name in histograms:
    for step in events.Histograms(name):
        histogram = step.histogram_value
        assert sum(histogram.bucket) == histogram.num > 0, (name, histogram)
        assert histogram.min <= histogram.sum / histogram.num <= histogram.max, (name, histogram)
        assert abs(histogram.bucket_limit[-1] - histogram.max) < 1e-9, (name, histogram)
print(len(training), "rows agree")
"#;

#[test]
fn tensorboard_and_pandas_read_the_metrics() {
    if !has_data("iris") {
        return;
    }
    let root = tempfile::tempdir().unwrap();
    let output = run(&repository().join("examples/iris/const.yaml"), root.path(), &[]);
    assert!(output.status.success(), "{}", describe_output(&output));
    let trials = glob_trials(root.path());
    let read = Command::new(tool("python")).args(["-c", READ]).arg(&trials[0]).output().unwrap();
    assert!(read.status.success(), "{}", describe_output(&read));
}

/// Reads the images and the text of a trial, and returns the steps of the images.
const READ_IMAGES: &str = r#"
import struct, sys, zlib
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.util import tensor_util
events = EventAccumulator(sys.argv[1] + "/tensorboard", size_guidance={"images": 0})
events.Reload()
images = events.Images("generated")
for image in images:
    assert (image.width, image.height) == (224, 224), image
    chunks, rest = {}, image.encoded_image_string
    assert rest[:8] == b"\x89PNG\r\n\x1a\n", rest[:8]
    rest = rest[8:]
    while rest:
        length, kind = struct.unpack(">I4s", rest[:8])
        assert zlib.crc32(rest[4 : 8 + length]) == struct.unpack(">I", rest[8 + length :][:4])[0]
        chunks[kind] = chunks.get(kind, b"") + rest[8 : 8 + length]
        rest = rest[12 + length :]
    # 8 bits, gray. Each row begins with its filter.
    assert struct.unpack(">IIBB", chunks[b"IHDR"][:10]) == (224, 224, 8, 0), chunks[b"IHDR"]
    assert len(zlib.decompress(chunks[b"IDAT"])) == 224 * 225
texts = events.Tensors("model")
assert events.SummaryMetadata("model").plugin_data.plugin_name == "text"
assert [text.step for text in texts] == [0], texts
text = tensor_util.make_ndarray(texts[0].tensor_proto).item().decode()
assert text == "Two networks with **32** hidden units each.", text
print([image.step for image in images])
"#;

#[test]
fn tensorboard_shows_images_and_texts() {
    if !has_data("mnist") {
        return;
    }
    let root = tempfile::tempdir().unwrap();
    let changes = [
        "searcher.maxLength.batches=6",
        "minValidationPeriod.batches=3",
        "hyperparameters.hidden=32",
    ];
    let more: Vec<&str> = changes.iter().flat_map(|change| ["--set", change]).collect();
    let output = run(&repository().join("examples/gan/const.yaml"), root.path(), &more);
    assert!(output.status.success(), "{}", describe_output(&output));
    let trials = glob_trials(root.path());
    let mut read = Command::new(tool("python"));
    let read = read.args(["-c", READ_IMAGES]).arg(&trials[0]).output().unwrap();
    assert!(read.status.success(), "{}", describe_output(&read));
    assert_eq!(String::from_utf8(read.stdout).unwrap().trim(), "[3, 6]");
}
