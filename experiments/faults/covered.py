"""The tests that inject faults of a kind, which then stand in no file here: room and kind, and the tests of `tests/`."""

COVERED: dict[str, tuple[str, ...]] = {
    "adopting adapters": (
        "hf/test_peft.py::test_what_is_no_plain_lora_is_refused_by_name",
        "hf/test_peft.py::test_a_pickle_or_a_part_of_a_file_is_not_opened",
        "hf/test_peft.py::test_a_tensor_missing_too_many_or_no_number_is_refused",
        "hf/test_peft.py::test_a_directory_without_adapters_is_refused",
    ),
    "adopting adopted-out": (
        "adopt/test_adopt_command.py::test_a_mistake_gets_one_sentence",
        "hf/test_peft.py::test_a_mistaken_command_gets_one_sentence_and_writes_nothing",
        "adopt/test_extra_files.py::test_a_full_disk_is_one_sentence_and_leaves_nothing",
        "adopt/test_importing.py::test_files_of_any_dtype_come_back_with_the_same_bytes",
    ),
    "adopting others-config": (
        "adopt/configs/test_converting.py::test_a_file_that_is_none_of_theirs_is_refused",
        "adopt/configs/test_llama_factory.py::test_a_method_that_is_not_here_is_said_at_once_to_change_what_is_learned",
        "adopt/configs/test_llama_factory.py::test_what_cannot_be_taken_over_is_refused_with_key_and_line",
        "adopt/configs/test_deepspeed.py::test_what_changes_what_is_learned_is_said_at_once",
        "adopt/configs/test_deepspeed.py::test_a_key_becomes_ours",
    ),
    "adopting theirs-config": (
        "hf/test_loading.py::test_what_cannot_be_computed_is_refused_by_name",
        "hf/test_loading.py::test_a_size_that_is_left_out_or_is_none_is_refused_by_name",
        "hf/test_loading.py::test_the_window_is_that_of_transformers_or_refused_where_layers_differ",
        "hf/test_loading.py::test_a_tensor_too_many_or_of_another_shape_is_refused",
        "adopt/test_adopt_command.py::test_what_is_not_whole_is_neither_called_so_nor_imported",
    ),
    "adopting tokenizer-beside": (
        "adopt/test_adopt_command.py::test_what_is_not_whole_is_neither_called_so_nor_imported",
    ),
    "adopting weights-file": (
        "adopt/test_adopt_command.py::test_what_is_not_whole_is_neither_called_so_nor_imported",
    ),
    "adopting weights-index": (
        "adopt/test_adopt_command.py::test_what_is_not_whole_is_neither_called_so_nor_imported",
        "hf/test_loading.py::test_an_index_that_names_what_is_not_in_its_directory_is_refused",
    ),
    "adopting weights-wrong": (
        "hf/test_loading.py::test_a_tensor_too_many_or_of_another_shape_is_refused",
        "hf/test_loading.py::test_whole_numbers_are_no_weights",
        "hf/test_loading.py::test_weights_that_are_no_numbers_are_refused",
        "adopt/test_adopt_command.py::test_what_is_not_whole_is_neither_called_so_nor_imported",
        "adopt/test_strangers_files.py::test_a_model_with_a_number_that_is_none_is_refused_however_it_comes_in",
    ),
    "checkpoints command-path": (
        "checkpoint/test_command.py::test_wrong_usage_is_one_sentence_and_exit_code_2",
        "checkpoint/test_command.py::test_nothing_that_is_damaged_is_read",
    ),
    "checkpoints commit-odd": (
        "checkpoint/test_steps.py::test_a_newer_format_is_no_damage",
        "checkpoint/test_steps.py::test_a_marker_that_vouches_for_nothing_is_damage",
        "checkpoint/test_finding.py::test_a_newer_format_is_refused_not_damaged",
    ),
    "checkpoints manifest-sealed": (
        "checkpoint/test_manifest.py::test_what_is_no_value_of_its_key_is_named",
        "checkpoint/test_manifest.py::test_what_is_no_manifest_at_all_is_named",
        "checkpoint/test_manifest.py::test_a_missing_key_is_named_and_one_of_a_later_version_is_passed_over",
        "checkpoint/test_command.py::test_a_manifest_that_is_wrong_under_right_digests_is_one_sentence",
    ),
    "checkpoints notebook-lock": (
        "checkpoint/test_checkpointer.py::test_a_checkpointer_that_could_not_be_made_does_not_lock_its_own_process_out",
        "checkpoint/test_checkpointer.py::test_one_that_was_refused_leaves_the_lock_with_its_owner",
    ),
    "checkpoints resume-path": (
        "checkpoint/test_finding.py::test_what_names_no_checkpoint_is_refused",
        "checkpoint/test_finding.py::test_damage_in_another_run_is_passed_over_and_left_there",
    ),
    "checkpoints step-damaged": (
        "checkpoint/test_finding.py::test_every_flipped_bit_is_caught_and_the_step_before_is_used",
        "checkpoint/test_finding.py::test_truncated_and_missing_files_are_caught_in_each_kind_of_file",
        "checkpoint/test_odd_steps.py::test_a_step_whose_own_files_are_garbled_is_set_aside",
        "checkpoint/test_odd_steps.py::test_what_is_no_file_in_the_place_of_an_array_is_damage_and_never_waited_for",
        "checkpoint/test_odd_steps.py::test_a_step_without_arrays_or_with_another_steps_is_damaged",
        "checkpoint/test_odd_steps.py::test_a_strangers_file_among_the_arrays_is_no_damage",
        "checkpoint/test_finding.py::test_if_all_is_damaged_nothing_is_started_or_touched",
    ),
    "checkpoints step-linked": (
        "checkpoint/test_odd_steps.py::test_checkpoints_and_a_step_that_are_links_to_another_disk_are_as_good_as_directories",
        "checkpoint/test_saving.py::test_retention_neither_removes_nor_counts_a_link_or_a_renamed_step",
    ),
    "checkpoints step-litter": (
        "checkpoint/test_odd_steps.py::test_a_name_that_is_no_number_is_no_step_and_reported_if_it_is_newer",
        "checkpoint/test_odd_steps.py::test_a_number_that_is_not_the_steps_own_is_passed_over",
        "checkpoint/test_odd_steps.py::test_what_is_no_step_at_all_is_set_aside",
        "checkpoint/test_odd_steps.py::test_what_is_named_like_a_leftover_and_is_none_is_left_alone",
        "checkpoint/test_finding.py::test_leftovers_are_removed_and_reported",
        "checkpoint/test_steps.py::test_setting_aside_never_overwrites",
        "checkpoint/test_saving.py::test_what_stands_where_a_step_belongs_is_set_aside_and_the_save_succeeds",
        "checkpoint/test_steps.py::test_leftovers_of_killed_processes_are_removed",
        "checkpoint/test_steps.py::test_a_step_is_removed_even_if_its_last_removal_was_cut_short_or_the_name_is_taken",
    ),
    "checkpoints step-renamed": (
        "checkpoint/test_odd_steps.py::test_a_renamed_step_directory_is_never_restored",
        "checkpoint/test_odd_steps.py::test_two_steps_that_changed_places_are_both_reported_and_the_one_between_is_restored",
        "checkpoint/test_odd_steps.py::test_the_real_step_is_saved_later_and_what_had_its_name_stays",
        "checkpoint/test_command.py::test_ls_and_verify_name_each_that_is_not_the_step_of_its_name",
    ),
    "config config-legal": (
        "config/test_load.py::test_a_byte_order_mark_is_no_part_of_the_text",
        "config/test_load.py::test_texts_that_yaml_takes_for_something_else_stay_texts",
        "test_config.py::test_an_odd_value_of_any_key_is_taken_whole_or_refused_in_a_sentence",
        "config/test_check.py::test_every_schedule_runs_on_one_stage_whatever_its_chunks",
        "config/test_check.py::test_fewer_microbatches_than_stages_are_noted_with_their_cost",
        "test_optim.py::test_learning_rate_climbs_from_the_first_rung_to_the_peak_and_ends_where_asked_at_the_last_step",
        "test_optim.py::test_a_run_no_longer_than_its_warm_up_never_decays",
        "test_mesh.py::test_mesh_smaller_than_the_machine_takes_its_first_devices",
        "test_train.py::test_print_config_prints_yaml_that_loads_to_the_same_config",
    ),
    "config config-path": (
        "test_config.py::test_what_is_no_plain_file_is_refused_without_waiting",
        "test_config.py::test_a_path_that_no_file_can_have_is_refused",
        "test_config.py::test_missing_config_names_the_nearest_file",
    ),
    "config config-value": (
        "test_config.py::test_bad_input_is_refused_in_one_sentence",
        "test_config.py::test_an_odd_value_of_any_key_is_taken_whole_or_refused_in_a_sentence",
        "test_config.py::test_what_a_shells_command_writes_to_a_pipe_is_a_config",
        "checkpoint/test_restoring.py::test_what_cannot_be_asked_for_is_refused",
        "test_cli.py::test_wrong_usage_is_one_sentence_and_exit_code_2",
    ),
    "config config-yaml": (
        "test_config.py::test_bad_input_is_refused_in_one_sentence",
    ),
    "features features-crossed": (
        "test_features.py::test_features_meet",
        "test_features.py::test_all_that_may_meet_meets_and_most_of_it_where_ci_looks",
    ),
    "features held-out-small": (
        "evaluate/test_evaluation.py::test_a_run_says_that_it_evaluates_on_fewer_batches_than_it_was_asked_for",
        "evaluate/test_validation.py::test_the_loss_is_that_of_the_runs_last_evaluation",
    ),
    "features islands-compressed": (
        "test_features.py::test_compressed_diloco_keeps_copies_of_a_weight_that_tensor_ranks_hold_whole",
        "test_features.py::test_features_meet",
    ),
    "features replica-flipped": (
        "test_train.py::test_copies_that_differ_end_a_run_before_they_are_saved",
    ),
    "features resume-advice": (
        "checkpoint/test_restoring.py::test_adapters_that_a_checkpoint_has_not_are_refused_with_a_way_that_is_legal",
    ),
    "features shard-while-running": (
        "data/test_shards.py::test_a_shard_overwritten_in_place_while_it_is_read_ends_the_next_read",
        "data/test_shards.py::test_a_shard_cut_short_while_it_is_read_is_an_error",
        "data/test_shards.py::test_a_shard_whose_content_is_as_prepared_is_read_on_whatever_its_inode_says",
    ),
    "library library-config": (
        "config/test_load.py::test_what_is_no_config_at_all_is_told_what_may_be",
        "config/test_load.py::test_what_no_config_holds_is_one_sentence",
    ),
    "library library-model": (
        "test_reader.py::test_what_is_no_path_is_refused_in_one_printable_sentence",
        "test_reader.py::test_nothing_is_read_when_all_is_damaged",
        "test_reader.py::test_what_are_no_ids_is_refused_rather_than_computed_with",
        "test_step.py::test_a_mean_is_one_however_little_the_labels_weigh",
    ),
    "library library-overrides": (
        "config/test_load.py::test_overrides_of_another_shape_are_told_how_they_are_written",
        "test_config.py::test_bad_input_is_refused_in_one_sentence",
    ),
    "library library-value": (
        "config/test_load.py::test_no_key_takes_what_no_yaml_file_can_hold",
        "config/test_load.py::test_what_yaml_has_no_word_for_is_refused_when_given_from_python",
    ),
    "nodes clock-of-a-node": (
        "survive/test_supervisor.py::test_a_rank_and_a_leader_are_killed_and_clocks_an_hour_apart_change_nothing_but_are_told",
    ),
    "nodes disk-supervised": (
        "survive/test_supervisor.py::test_a_disk_that_is_full_while_a_rank_is_killed",
        "survive/test_batches.py::test_on_a_full_disk_lines_wait_and_the_rank_goes_on",
    ),
    "nodes launch-killed": (
        "launch/test_local_nodes.py::test_a_killed_launcher_leaves_nobody_behind",
        "survive/test_child.py::test_what_killed_supervisors_have_left_in_memory_is_removed_and_nothing_else",
    ),
    "nodes node-paused": (
        "survive/test_supervisor.py::test_a_node_that_is_paused_whole_keeps_no_lock_and_writes_no_more",
    ),
    "nodes node-throttled": (
        "survive/test_training_processes.py::test_a_rank_that_is_stopped_most_of_the_time_is_the_slow_one_and_of_two_alike_none_is",
        "survive/test_stragglers.py::test_a_rank_that_is_stopped_now_and_then_is_slow_and_why_is_told",
    ),
    "nodes nodes-differ": (
        "survive/test_supervisor.py::test_nodes_with_different_configs_are_refused_before_anything_is_trained",
        "survive/test_view.py::test_what_differs_between_nodes_is_named",
    ),
    "numbers loss-scale": (
        "test_train.py::test_a_float16_run_that_only_skips_ends_with_exit_code_1",
        "test_precision.py::test_loss_scale_never_grows_beyond_the_largest",
        "test_precision.py::test_loss_scale_itself_overflows_float16_and_comes_down_to_what_fits",
        "test_config.py::test_bad_input_is_refused_in_one_sentence",
    ),
    "numbers not-finite": (
        "test_train.py::test_a_gradient_that_is_not_finite_stops_the_run_with_exit_code_1_and_says_at_which_step",
        "test_train.py::test_weights_that_an_update_made_useless_are_never_saved",
        "test_precision.py::test_one_number_makes_a_state_unsound",
    ),
    "numbers offload": (
        "test_features.py::test_features_meet",
        "parallel/test_offload.py::test_a_skipped_step_leaves_an_offloaded_optimizer_state_bit_for_bit_and_on_the_host",
        "checkpoint/test_global_arrays.py::test_an_optimizer_state_in_host_memory_goes_and_comes_back_there",
    ),
    "planning cluster-file": (
        "cluster/test_cluster.py::test_a_bad_description_is_one_sentence_with_what_is_legal",
        "cluster/test_cluster.py::test_an_empty_description_is_told_what_it_needs_and_that_is_enough",
        "test_config.py::test_bad_input_is_refused_in_one_sentence",
    ),
    "planning cluster-path": (
        "plan/test_plan_command.py::test_bad_input_is_one_sentence_and_code_2_before_anything_is_done",
        "cluster/test_cluster.py::test_a_name_that_no_file_can_have_is_an_unknown_cluster",
        "test_cli.py::test_an_empty_argument_is_refused",
    ),
    "planning plan-as-train": (
        "plan/test_plan_command.py::test_what_training_would_refuse_here_is_noted",
        "config/test_places.py::test_a_list_of_jobs_names_configs_from_its_folder",
        "adopt/test_beginning.py::test_weights_that_are_not_there_are_refused_in_one_sentence",
    ),
    "planning plan-option": (
        "plan/test_plan_command.py::test_bad_input_is_one_sentence_and_code_2_before_anything_is_done",
        "test_cli.py::test_wrong_usage_is_one_sentence_and_exit_code_2",
    ),
    "planning plan-size": (
        "plan/test_plan_command.py::test_what_does_not_fit_says_by_how_much_and_three_ways_out",
    ),
    "planning schedule-table": (
        "schedule/test_table.py::test_csv_errors_name_row_column_and_what_is_legal",
        "schedule/test_table.py::test_what_is_no_table_is_one_sentence",
        "plan/test_plan_command.py::test_every_table_that_is_wrong_is_one_sentence_and_code_2",
    ),
    "planning stdout": (
        "plan/test_plan_command.py::test_a_reader_that_has_had_enough_gets_no_traceback",
    ),
    "prepare input-partly": (
        "data/test_documents.py::test_a_bad_document_is_reported_by_name_and_kind",
        "data/test_documents.py::test_what_else_a_line_of_json_holds_does_no_harm",
        "data/test_documents.py::test_of_a_damaged_compressed_file_no_line_is_taken",
        "data/test_documents.py::test_compressed_files_in_several_pieces_are_read_whole",
        "data/test_input_files.py::test_suffixes_in_capitals_are_taken_as_those_in_small_letters",
        "data/test_input_files.py::test_links_are_followed_and_what_they_reach_again_is_read_once",
        "data/test_refused_reads.py::test_a_document_that_this_user_may_not_read_is_still_left_out_by_name",
        "data/test_prepare.py::test_bad_documents_are_refused_by_choice",
    ),
    "prepare input-refused": (
        "data/test_input_files.py::test_what_is_no_input_is_reported_as_what_it_is",
        "data/test_input_files.py::test_nothing_to_read_is_refused",
        "data/test_documents.py::test_a_bad_document_is_reported_by_name_and_kind",
        "data/test_prepare.py::test_an_input_of_bad_documents_alone_is_refused",
        "data/test_documents.py::test_of_a_damaged_compressed_file_no_line_is_taken",
        "data/test_documents.py::test_of_a_damaged_parquet_file_no_row_is_taken",
    ),
    "prepare output-damaged": (
        "data/test_prepare.py::test_what_was_altered_cut_or_removed_is_made_again_and_what_is_not_ours_is_left",
        "data/test_prepare.py::test_a_directory_in_the_place_of_a_file_is_named",
    ),
    "prepare output-taken": (
        "data/test_data_command.py::test_what_cannot_be_an_output_is_one_sentence",
        "data/test_data_command.py::test_the_output_may_lie_in_the_input",
        "data/test_data_command.py::test_wrong_usage_is_one_sentence_and_exit_code_2",
        "data/test_data_command.py::test_prepare_of_documents_that_are_all_held_out_ends_with_a_sentence",
        "data/test_prepare.py::test_a_damaged_plan_is_reported",
        "data/test_prepare.py::test_other_text_options_or_tokenizer_never_mix_with_what_is_there",
        "data/test_prepare.py::test_a_directory_that_holds_something_else_is_left_alone",
    ),
    "prepare prepare-option": (
        "data/test_data_command.py::test_wrong_usage_is_one_sentence_and_exit_code_2",
        "test_cli.py::test_wrong_usage_is_one_sentence_and_exit_code_2",
        "data/test_tokenizer.py::test_a_vocabulary_smaller_than_the_bytes_is_refused",
    ),
    "prepare tokenizer-out": (
        "data/test_data_command.py::test_a_tokenizer_that_cannot_be_written_is_reported",
    ),
    "refused call": (
        "checkpoint/test_refused_calls.py::test_no_cell_is_silent_lost_a_traceback_or_a_hang",
    ),
    "requests one-of-two": (
        "checkpoint/test_faults.py::test_a_process_that_is_killed_is_reported_by_the_other_in_one_sentence",
        "checkpoint/test_faults.py::test_a_preemption_notice_to_one_of_two_processes_stops_both_with_a_checkpoint_and_code_75",
    ),
    "requests other-signal": (
        "run/test_signals.py::test_the_first_signal_ends_what_is_under_way_and_between_steps_asks_and_is_reported",
        "run/test_signals.py::test_a_run_under_nohup_outlives_its_terminal",
    ),
    "requests rank-environment": (
        "test_joining.py::test_a_variable_that_jax_would_stumble_over_is_refused_by_name",
        "test_joining.py::test_a_variable_that_is_missing_is_named",
        "test_joining.py::test_variables_of_slurm_that_do_not_agree_are_refused_by_name",
    ),
    "requests stopped": (
        "test_train.py::test_a_signal_before_the_first_step_gives_up_at_once_and_loses_nothing",
        "test_train.py::test_a_signal_in_an_evaluation_is_met_by_the_next_step_and_its_checkpoint",
        "test_train.py::test_a_signal_in_the_last_save_finds_the_run_done",
        "checkpoint/test_faults.py::test_a_signal_ends_a_run_with_a_checkpoint_of_its_last_step_and_code_75",
        "checkpoint/test_faults.py::test_a_second_signal_ends_a_run_at_once_and_leaves_the_last_checkpoint_intact",
    ),
    "requests stopped-compiling": (
        "test_train.py::test_a_signal_while_the_first_step_compiles_ends_the_process_with_75",
    ),
    "requests stopped-importing": (
        "test_train.py::test_a_signal_in_the_imports_is_one_sentence_and_code_75",
        "test_cli.py::test_an_interrupt_while_a_command_imports_is_a_sentence",
    ),
    "requests stopped-preparing": (
        "data/test_data_command.py::test_a_signal_stops_it_with_exit_code_75_and_it_goes_on",
        "data/test_prepare.py::test_a_killed_run_with_workers_goes_on_to_the_same_bytes",
        "test_cli.py::test_a_command_ends_quietly_at_any_moment_of_its_start",
    ),
    "run leftovers": (
        "run/test_lock.py::test_a_shorter_owner_overwrites_a_longer_one",
        "checkpoint/test_finding.py::test_leftovers_are_removed_and_reported",
    ),
    "run metrics-damaged": (
        "run/test_rows.py::test_a_torn_last_row_is_dropped_even_if_its_step_counts",
        "run/test_rows.py::test_a_link_to_the_rows_is_followed",
        "run/test_directory.py::test_metrics_that_are_no_file_are_refused",
        "run/test_rows.py::test_rows_after_the_step_are_dropped_and_each_step_is_kept_once",
        "run/test_rows.py::test_a_row_that_is_lost_costs_no_other",
        "run/test_rows.py::test_nothing_is_rewritten_when_nothing_is_dropped_and_no_file_is_no_error",
    ),
    "run resume-never": (
        "checkpoint/test_finding.py::test_never_moves_what_was_there_out_of_the_way",
        "checkpoint/test_finding.py::test_a_run_that_ended_before_its_first_checkpoint_starts_anew_and_its_rows_are_set_aside",
        "run/test_directory.py::test_what_is_set_aside_never_meets_what_was_before_and_a_link_leads_where_it_led",
    ),
    "run run-over": (
        "checkpoint/test_training.py::test_a_run_with_nothing_left_to_do_says_so",
        "test_train.py::test_a_run_that_is_done_adds_nothing_when_run_again",
    ),
    "run run-path": (
        "run/test_directory.py::test_what_is_no_directory_is_refused",
        "run/test_directory.py::test_any_other_name_is_a_directorys",
        "run/test_lock.py::test_what_is_no_lock_is_refused_and_nothing_behind_it_is_touched",
        "checkpoint/test_finding.py::test_a_file_in_place_of_the_checkpoints_is_refused_in_one_sentence",
        "test_errors.py::test_a_sentence_stays_one_line_that_every_terminal_takes",
    ),
    "run steps-missing": (
        "checkpoint/test_finding.py::test_a_run_that_had_a_checkpoint_and_has_none_is_refused_with_both_ways_out",
    ),
    "run two-at-once": (
        "checkpoint/test_faults.py::test_a_second_run_in_the_directory_is_refused_and_the_first_goes_on",
        "run/test_lock.py::test_a_second_process_is_refused_and_reported_who_holds_it_and_who_only_asks_learns_of_it",
    ),
    "run vanished-while-running": (
        "run/test_record.py::test_a_directory_that_goes_away_is_made_again_locked_and_reported_once",
        "run/test_record.py::test_a_file_that_goes_away_is_made_again",
        "run/test_record.py::test_a_run_ends_where_another_has_taken_its_directory",
        "run/test_rows.py::test_a_file_in_its_place_is_set_aside",
        "run/test_rows.py::test_rows_that_somebody_cuts_off_are_reported_once",
        "checkpoint/test_training.py::test_a_run_directory_that_is_removed_while_the_run_goes_on_is_there_again_at_its_end",
    ),
    "serving request-body": (
        "serve/test_malformed.py::test_a_malformed_request_gets_its_own_4xx_and_the_server_goes_on",
        "serve/test_malformed.py::test_a_body_that_is_not_said_to_be_json_is_refused",
        "serve/test_adversity.py::test_a_body_that_asks_for_nothing_is_refused_in_a_short_sentence",
    ),
    "serving request-bytes": (
        "serve/test_adversity.py::test_what_is_no_http_is_refused",
        "serve/test_listening.py::test_a_request_with_two_lengths_is_refused_and_nothing_behind_it_is_read",
        "serve/test_app.py::test_without_a_key_only_its_own_names_are_answered",
        "serve/test_adversity.py::test_a_crowd_of_connections_is_answered",
        "serve/test_metrics.py::test_whoever_asks_for_no_format_gets_the_text_that_every_scraper_parses",
    ),
    "serving request-field": (
        "serve/test_malformed.py::test_a_malformed_request_gets_its_own_4xx_and_the_server_goes_on",
        "serve/test_malformed.py::test_no_field_takes_an_odd_value_and_none_is_shown_as_it_is",
    ),
    "sources cache-damaged": (
        "data/test_cache.py::test_cached_shards_that_are_damaged_are_reported_and_made_again",
        "data/test_pieces.py::test_a_damaged_table_is_reported_and_made_again",
        "data/test_pieces.py::test_what_is_no_file_gives_way_to_the_table_and_a_directory_is_reported",
    ),
    "sources cache-path": (
        "data/test_cache.py::test_a_cache_that_cannot_be_written_is_reported",
        "data/test_pieces.py::test_a_cache_that_cannot_be_written_is_reported",
    ),
    "sources data-changed": (
        "checkpoint/test_training.py::test_a_run_whose_text_has_changed_goes_on_only_when_that_is_allowed",
        "checkpoint/test_restoring.py::test_data_that_changed_are_refused_with_the_ways_out",
        "checkpoint/test_restoring.py::test_data_that_changed_and_are_allowed_to_or_are_held_out_are_reported",
        "data/test_from_config.py::test_the_digest_names_what_is_read_and_not_where_it_lies_or_when_it_was_written",
    ),
    "sources shard-damaged": (
        "data/test_shards.py::test_a_damaged_shard_is_refused_by_name_and_one_of_another_size_even_without_digests",
        "data/test_shards.py::test_a_directory_without_a_manifest_of_ours_is_refused",
        "data/test_data_command.py::test_prepare_then_verify_then_damage",
        "data/test_shards.py::test_what_is_no_file_in_the_place_of_a_manifest_is_refused",
    ),
    "sources shard-manifest": (
        "data/test_shards.py::test_a_manifest_whose_values_make_no_sense_is_refused",
        "data/test_shards.py::test_a_count_that_is_not_the_files_own_is_refused",
        "data/test_shards.py::test_a_directory_without_a_manifest_of_ours_is_refused",
        "data/test_shards.py::test_a_damaged_shard_is_refused_by_name_and_one_of_another_size_even_without_digests",
    ),
    "sources source-odd": (
        "data/test_prepare.py::test_a_file_whose_name_is_not_utf8_or_several_lines_is_read_all_the_same_and_is_a_line_of_the_log",
        "data/test_prepare.py::test_long_texts_are_cut_at_line_ends_and_lose_nothing",
        "data/test_input_files.py::test_links_are_followed_and_what_they_reach_again_is_read_once",
        "data/test_input_files.py::test_pipes_sockets_and_prepared_shards_are_left_out_and_reported",
    ),
    "sources source-path": (
        "data/test_from_config.py::test_a_source_that_is_not_there_is_reported_with_the_nearest_spelling",
        "data/test_from_config.py::test_a_preparation_that_was_not_finished_is_reported",
        "data/test_from_config.py::test_without_held_out_text_there_are_no_validation_batches_unless_asked_for",
        "data/test_from_config.py::test_text_that_fills_no_batch_is_one_that_is_padded",
        "data/test_cache.py::test_a_source_that_cannot_be_read_is_reported_in_a_sentence",
        "data/test_input_files.py::test_nothing_to_read_is_refused",
        "data/test_input_files.py::test_what_is_no_input_is_reported_as_what_it_is",
        "data/test_mixture.py::test_a_mixture_that_makes_no_sense_is_refused",
        "data/test_prepare.py::test_an_input_of_bad_documents_alone_is_refused",
    ),
    "sources tokenizer-file": (
        "data/test_tokenizer.py::test_a_file_that_holds_no_tokenizer_is_refused",
        "data/test_tokenizer.py::test_what_is_no_file_is_no_tokenizer_and_not_waited_for",
        "data/test_tokenizer.py::test_a_text_that_has_no_token_where_none_is_unknown_is_a_sentence",
        "data/test_from_config.py::test_text_of_which_the_tokenizer_knows_nothing_is_refused",
        "data/test_from_config.py::test_a_vocabulary_too_large_for_the_model_is_reported_with_its_size",
    ),
    "sources two-at-once": (
        "data/test_cache.py::test_processes_that_start_at_once_share_one_preparation",
    ),
    "starved full-cache": (
        "data/test_pieces.py::test_a_full_disk_is_reported_and_nothing_of_the_table_is_left",
        "data/test_data_command.py::test_a_full_disk_is_reported_with_the_directory_and_leaves_no_halves",
    ),
    "starved full-disk": (
        "checkpoint/test_starved.py::test_a_disk_that_is_full_from_the_start_is_reported_in_one_sentence",
        "checkpoint/test_starved.py::test_a_run_that_would_go_on_on_a_full_disk_is_refused_and_keeps_its_rows_and_config",
        "checkpoint/test_starved.py::test_on_a_full_disk_training_goes_on_or_stops_and_the_last_step_stays_intact",
    ),
    "starved permission": (
        "checkpoint/test_odd_steps.py::test_a_step_that_this_user_may_not_read_is_left_alone_and_no_earlier_one_is_taken",
        "run/test_directory.py::test_metrics_of_another_user_are_refused",
        "checkpoint/test_saving.py::test_a_step_that_cannot_be_removed_is_reported_and_the_save_has_not_failed",
        "checkpoint/test_steps.py::test_a_leftover_that_cannot_be_removed_is_reported_and_no_reason_to_stop",
        "data/test_refused_reads.py::test_a_document_that_this_user_may_not_read_is_still_left_out_by_name",
    ),
    "starved read-only": (
        "checkpoint/test_starved.py::test_checkpoints_that_cannot_be_written_are_reported_and_the_run_does_not_end_well",
        "checkpoint/test_starved.py::test_a_read_only_run_directory_is_refused_in_one_sentence",
    ),
    "surroundings clock": (
        "checkpoint/test_finding.py::test_a_clock_that_was_set_back_changes_nothing",
    ),
    "surroundings environment": (
        "test_train.py::test_python_that_takes_every_warning_for_an_error_has_none_to_take",
    ),
    "surroundings suspended": (
        "checkpoint/test_faults.py::test_a_second_run_in_the_directory_is_refused_and_the_first_goes_on",
    ),
    "surroundings umask": (
        "test_cli.py::test_what_a_command_makes_is_not_everybodys_to_write",
    ),
}
