//! Tests of images and their batches.

use super::*;
use burn::tensor::DType;

/// Two single-channel images of 2 x 3 pixels: 0 to 5, and 10 to 60.
fn images() -> Images {
    let pixels = vec![0, 1, 2, 3, 4, 5, 10, 20, 30, 40, 50, 60];
    Images::new(pixels, vec![7, 9], [1, 2, 3]).unwrap()
}

fn batch(images: &Images, samples: &[usize], epoch: u64) -> (Vec<f32>, Vec<i64>) {
    let device = Device::flex();
    let context = BatchContext { device: &device, dtype: DType::F32, epoch, seed: 5 };
    let (values, labels): (Tensor<4>, Tensor<1, Int>) = images.batch(samples, &context).unwrap();
    assert_eq!(values.dims()[0], samples.len());
    let flat: (Tensor<2>, Tensor<1, Int>) = images.batch(samples, &context).unwrap();
    assert_eq!(flat.0.dims(), [samples.len(), images.shape().iter().product()]);
    let values = values.into_data().try_to_vec::<f32>().unwrap();
    assert_eq!(values, flat.0.into_data().try_to_vec::<f32>().unwrap());
    (values, labels.into_data().convert::<i64>().try_to_vec().unwrap())
}

/// Returns the pixel bytes of the second image in a batch.
fn pixels(augment: Augment, epoch: u64) -> Vec<u8> {
    let (values, _) = batch(&images().augmented(augment), &[1], epoch);
    values.iter().map(|value| (value * 255.0).round() as u8).collect()
}

#[test]
fn batch_has_the_samples_in_request_order() {
    let (values, labels) = batch(&images(), &[1, 0], 0);
    assert_eq!(labels, [9, 7]);
    let bytes: Vec<u8> = values.iter().map(|value| (value * 255.0).round() as u8).collect();
    assert_eq!(bytes, [10, 20, 30, 40, 50, 60, 0, 1, 2, 3, 4, 5]);
}

#[test]
fn channels_are_normalized_separately() {
    let images = Images::new(vec![255, 0], vec![1], [2, 1, 1]).unwrap();
    let images = images.normalized(&[0.5, 0.25], &[0.5, 0.125]).unwrap();
    assert_eq!(batch(&images, &[0], 0).0, [1.0, -2.0]);
}

#[test]
fn flip_mirrors_rows_in_half_the_epochs() {
    let flip = Augment { flip: true, shift: 0 };
    let flipped = (0..100).filter(|epoch| match &pixels(flip, *epoch)[..] {
        [30, 20, 10, 60, 50, 40] => true,
        [10, 20, 30, 40, 50, 60] => false,
        other => panic!("neither the image nor its mirror: {other:?}"),
    });
    assert!((30..70).contains(&flipped.count()));
}

#[test]
fn shift_is_bounded_and_fills_with_black() {
    let shift = Augment { flip: false, shift: 1 };
    let seen: std::collections::BTreeSet<_> = (0..200).map(|epoch| pixels(shift, epoch)).collect();
    assert_eq!(seen.len(), 9, "{seen:?}");
    assert!(seen.contains(&vec![10, 20, 30, 40, 50, 60]));
    assert!(seen.contains(&vec![50, 60, 0, 0, 0, 0]));
    assert!(seen.contains(&vec![0, 0, 0, 0, 10, 20]));
}

#[test]
fn augmentation_depends_on_sample_and_epoch_only() {
    let images = images().augmented(Augment { flip: true, shift: 2 });
    for epoch in 0..20 {
        let (both, _) = batch(&images, &[0, 1], epoch);
        let (second, _) = batch(&images, &[1], epoch);
        assert_eq!(both[6..], second);
    }
}

#[test]
fn counts_that_do_not_match_are_refused() {
    let check = |pixels: usize, labels: usize, expected: &str| {
        let error = Images::new(vec![0; pixels], vec![0; labels], [1, 2, 3]).unwrap_err();
        assert!(error.to_string().contains(expected), "{error}");
    };
    check(0, 0, "expected at least one image, found none");
    check(13, 2, "expected a multiple of 6 bytes, found 13 bytes");
    check(12, 3, "expected 2 labels, one for each image, found 3 labels");
    let check = |mean: &[f32], std: &[f32]| {
        let error = images().normalized(mean, std).unwrap_err().to_string();
        assert!(error.contains("expected 1 finite numbers each"), "{error}");
    };
    check(&[0.5], &[]);
    check(&[0.5, 0.5], &[1.0, 1.0]);
    check(&[f32::NAN], &[1.0]);
    check(&[0.5], &[0.0]);
}

#[test]
fn idx_files_must_have_equal_sample_counts() {
    let folder = tempfile::tempdir().unwrap();
    let (images, labels) = (folder.path().join("images"), folder.path().join("labels"));
    let sizes =
        |sizes: &[u32]| sizes.iter().flat_map(|size| size.to_be_bytes()).collect::<Vec<_>>();
    let pixels = [&[0, 0, 8, 3][..], &sizes(&[2, 1, 1]), &[5, 6]].concat();
    std::fs::write(&images, pixels).unwrap();
    std::fs::write(&labels, [&[0, 0, 8, 1][..], &sizes(&[2]), &[3, 4]].concat()).unwrap();
    assert_eq!(Images::idx(&images, &labels).unwrap().labels(), [3, 4]);
    std::fs::write(&labels, [&[0, 0, 8, 1][..], &sizes(&[1]), &[3]].concat()).unwrap();
    let error = Images::idx(&images, &labels).unwrap_err().to_string();
    assert!(error.contains("expected 2 labels, one for each image, found 1 labels"), "{error}");
}
